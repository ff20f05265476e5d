package vhostvsock

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// region is a mapped piece of the guest's memory.
type region struct {
	regionSpec
	data    []byte // size bytes
	mapping []byte // the mapping to unmap; contains data
}

// memory is the guest's memory. The slices that it returns are shared with the guest, whose writes
// may change them at any moment. So read a value once, then check it, then use it. The slices are
// valid until close.
type memory struct {
	regions []region
}

// mapMemory maps each region from the descriptor with the same index. The caller keeps the
// descriptors.
func mapMemory(specs []regionSpec, fds []int) (*memory, error) {
	if len(fds) != len(specs) {
		return nil, fmt.Errorf("memory table of %d regions came with %d descriptors", len(specs), len(fds))
	}
	m := &memory{}
	for i, s := range specs {
		r, err := mapRegion(s, fds[i])
		if err != nil {
			m.close()
			return nil, err
		}
		m.regions = append(m.regions, r)
	}
	return m, nil
}

func mapRegion(s regionSpec, fd int) (region, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return region{}, fmt.Errorf("memory region at %#x: %w", s.guestAddr, err)
	}
	end := s.offset + s.size
	if st.Mode&unix.S_IFMT == unix.S_IFREG && end > uint64(st.Size) {
		// An access beyond the end of the file would cause a SIGBUS.
		return region{}, fmt.Errorf("memory region at %#x ends at %#x of a file of %#x bytes", s.guestAddr, end, st.Size)
	}
	// The mapping starts at 0, because offset may not be a multiple of the file's page size (huge
	// pages).
	mapping, err := unix.Mmap(fd, 0, int(end), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return region{}, fmt.Errorf("mmap of memory region at %#x, %#x bytes: %w", s.guestAddr, end, err)
	}
	return region{regionSpec: s, data: mapping[s.offset:end:end], mapping: mapping}, nil
}

func (m *memory) close() {
	for _, r := range m.regions {
		if r.mapping != nil {
			unix.Munmap(r.mapping)
		}
	}
	m.regions = nil
}

// guest returns n bytes at a guest address. They must lie in one region.
func (m *memory) guest(addr, n uint64) ([]byte, error) {
	for i := range m.regions {
		r := &m.regions[i]
		if b, ok := within(r.data, addr, r.guestAddr, n); ok {
			return b, nil
		}
	}
	return nil, fmt.Errorf("guest address %#x and %d bytes: not in one memory region", addr, n)
}

// user returns n bytes at an address of the front end. They must lie in one region, and their
// address in this process must be a multiple of align.
func (m *memory) user(addr, n, align uint64) ([]byte, error) {
	for i := range m.regions {
		r := &m.regions[i]
		b, ok := within(r.data, addr, r.userAddr, n)
		if !ok || n == 0 {
			continue
		}
		if uintptr(unsafe.Pointer(&b[0]))%uintptr(align) != 0 {
			return nil, fmt.Errorf("front end's address %#x: not aligned to %d", addr, align)
		}
		return b, nil
	}
	return nil, fmt.Errorf("front end's address %#x and %d bytes: not in one memory region", addr, n)
}

// within returns [addr, addr+n) of data, which begins at address start.
func within(data []byte, addr, start, n uint64) ([]byte, bool) {
	size := uint64(len(data))
	if addr < start || addr-start > size || n > size-(addr-start) {
		return nil, false
	}
	at := addr - start
	return data[at : at+n : at+n], true
}

// load16 atomically loads the little-endian u16 at b[off:], which must be aligned to 2. Go has no
// 16-bit atomics, so it loads the whole aligned word.
func load16(b []byte, off int) uint16 {
	word, shift := wordOf(b, off)
	return uint16(atomic.LoadUint32(word) >> shift)
}

// store16 atomically stores a u16, and leaves the other half of its word unchanged, because another
// party may write that half. It is a full memory barrier.
func store16(b []byte, off int, v uint16) {
	word, shift := wordOf(b, off)
	for {
		old := atomic.LoadUint32(word)
		if atomic.CompareAndSwapUint32(word, old, old&^(0xffff<<shift)|uint32(v)<<shift) {
			return
		}
	}
}

// wordOf returns the aligned word that contains b[off:off+2], and the position of these bytes in
// it. The word lies in the same region, because regions begin and end at word boundaries.
func wordOf(b []byte, off int) (*uint32, int) {
	p := unsafe.Pointer(&b[off : off+2][0])
	odd := int(uintptr(p) & 2)
	return (*uint32)(unsafe.Add(p, -odd)), 8 * odd
}
