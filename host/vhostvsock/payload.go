package vhostvsock

import (
	"encoding/binary"
	"fmt"
)

// The payloads of docs/interop/vhost-user.rst, "Message specification". All integers are in the
// host's byte order, which is little endian on all supported hosts.

// regionSpec is a "memory region description": the address at which the front end maps a piece of
// the guest's memory, and the offset of that piece in the attached descriptor.
type regionSpec struct {
	guestAddr, size, userAddr, offset uint64
}

const regionSpecSize = 32

// parseMemTable parses the payload of SET_MEM_TABLE. It does not check for overlaps, because the
// front end is trusted in this; the first match wins.
func parseMemTable(b []byte) ([]regionSpec, error) {
	if len(b) < 8 {
		return nil, fmt.Errorf("memory table of %d bytes, want at least 8", len(b))
	}
	count := binary.LittleEndian.Uint32(b)
	if count > maxRegions {
		return nil, fmt.Errorf("memory table of %d regions, limit %d", count, maxRegions)
	}
	if want := 8 + int(count)*regionSpecSize; len(b) != want {
		return nil, fmt.Errorf("memory table of %d bytes, want %d for %d regions", len(b), want, count)
	}
	specs := make([]regionSpec, count)
	for i := range specs {
		r := b[8+i*regionSpecSize:]
		s := regionSpec{
			guestAddr: binary.LittleEndian.Uint64(r),
			size:      binary.LittleEndian.Uint64(r[8:]),
			userAddr:  binary.LittleEndian.Uint64(r[16:]),
			offset:    binary.LittleEndian.Uint64(r[24:]),
		}
		if err := s.check(); err != nil {
			return nil, err
		}
		specs[i] = s
	}
	return specs, nil
}

// maxRegionEnd keeps sizes and offsets far below an overflow of the int64 for mmap(2). Real guests'
// regions end below it.
const maxRegionEnd = 1 << 52

func (s regionSpec) check() error {
	if s.size == 0 || s.size > maxRegionEnd || s.offset > maxRegionEnd-s.size {
		return fmt.Errorf("memory region at %#x: size %#x at offset %#x is out of bounds", s.guestAddr, s.size, s.offset)
	}
	if s.guestAddr+s.size < s.guestAddr || s.userAddr+s.size < s.userAddr {
		return fmt.Errorf("memory region at %#x, mapped at %#x: size %#x wraps around", s.guestAddr, s.userAddr, s.size)
	}
	if (s.size|s.offset)%4 != 0 {
		// Rings are accessed in whole words; see load16.
		return fmt.Errorf("memory region at %#x: size %#x, offset %#x: not a multiple of 4", s.guestAddr, s.size, s.offset)
	}
	return nil
}

// parseUint64 parses a payload that is one u64.
func parseUint64(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, fmt.Errorf("payload of %d bytes, want 8", len(b))
	}
	return binary.LittleEndian.Uint64(b), nil
}

// parseVringState parses a "vring state description": a queue and a number.
func parseVringState(b []byte) (index, num uint32, err error) {
	if len(b) != 8 {
		return 0, 0, fmt.Errorf("vring state of %d bytes, want 8", len(b))
	}
	return binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]), nil
}

// vringAddr is a "vring address description". The addresses are the front end's.
type vringAddr struct {
	index             uint32
	desc, used, avail uint64
}

func parseVringAddr(b []byte) (vringAddr, error) {
	if len(b) != 40 {
		return vringAddr{}, fmt.Errorf("vring addresses of %d bytes, want 40", len(b))
	}
	return vringAddr{
		index: binary.LittleEndian.Uint32(b),
		desc:  binary.LittleEndian.Uint64(b[8:]),
		used:  binary.LittleEndian.Uint64(b[16:]),
		avail: binary.LittleEndian.Uint64(b[24:]),
	}, nil
}

// parseConfigRequest parses a "virtio device config space". The reply repeats its 12 bytes,
// followed by the contents.
func parseConfigRequest(b []byte) (offset, size uint32, err error) {
	if len(b) < configHeaderSize {
		return 0, 0, fmt.Errorf("config request of %d bytes, want at least %d", len(b), configHeaderSize)
	}
	offset, size = binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	if uint64(size) != uint64(len(b)-configHeaderSize) {
		return 0, 0, fmt.Errorf("config request for %d bytes has room for %d", size, len(b)-configHeaderSize)
	}
	return offset, size, nil
}

const configHeaderSize = 12
