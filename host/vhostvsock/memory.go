package vhostvsock

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// region is a piece of the guest's memory as we have it mapped.
type region struct {
	regionSpec
	data    []byte // size bytes
	mapping []byte // what munmap takes; data lies in it
}

// memory is the guest's memory. Slices that it hands out are shared with the
// guest: what is read there may change at any moment, so a value is read once,
// then checked, then used. They are valid until close.
type memory struct {
	regions []region
}

// mapMemory maps each region from the descriptor of the same index. It does
// not take the descriptors over.
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
		// Touching pages beyond the end of the file would be a SIGBUS.
		return region{}, fmt.Errorf("memory region at %#x ends at %#x of a file of %#x bytes", s.guestAddr, end, st.Size)
	}
	// From 0, because the offset need not fit the page size of the file (huge pages).
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

// guest returns n bytes at an address of the guest; they lie in one region.
func (m *memory) guest(addr, n uint64) ([]byte, error) {
	for i := range m.regions {
		r := &m.regions[i]
		if b, ok := within(r.data, addr, r.guestAddr, n); ok {
			return b, nil
		}
	}
	return nil, fmt.Errorf("guest address %#x and %d bytes: not in one memory region", addr, n)
}

// user returns n bytes at an address of the front end; they lie in one region.
// It must be a multiple of align where we have it mapped, too.
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

// within cuts [addr, addr+n) out of data, which begins at address start.
func within(data []byte, addr, start, n uint64) ([]byte, bool) {
	size := uint64(len(data))
	if addr < start || addr-start > size || n > size-(addr-start) {
		return nil, false
	}
	at := addr - start
	return data[at : at+n : at+n], true
}

// load16 atomically loads the little-endian u16 at b[off:], which is aligned
// to 2. There is no 16-bit atomic in Go: the whole aligned word is loaded.
func load16(b []byte, off int) uint16 {
	word, shift := wordOf(b, off)
	return uint16(atomic.LoadUint32(word) >> shift)
}

// store16 atomically stores a u16 and leaves the other half of its word, which
// may be someone else's, as it is. It is a full memory barrier.
func store16(b []byte, off int, v uint16) {
	word, shift := wordOf(b, off)
	for {
		old := atomic.LoadUint32(word)
		if atomic.CompareAndSwapUint32(word, old, old&^(0xffff<<shift)|uint32(v)<<shift) {
			return
		}
	}
}

// wordOf returns the aligned word that holds b[off:off+2] and its place there.
// The word lies in the same region, since regions begin and end at words.
func wordOf(b []byte, off int) (*uint32, int) {
	p := unsafe.Pointer(&b[off : off+2][0])
	odd := int(uintptr(p) & 2)
	return (*uint32)(unsafe.Add(p, -odd)), 8 * odd
}
