package filesystem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// btrfsSuper has the fields of struct btrfs_super_block (include/uapi/linux/btrfs_tree.h) that are
// used. All fields are little-endian.
type btrfsSuper struct {
	uuid      [16]byte
	devices   uint64
	blockSize uint64 // sectorsize
	device    uint64 // the number of the device with this superblock
	bytes     uint64 // where the filesystem ends on this device
}

const (
	btrfsSuperOffset = 64 << 10
	btrfsSuperSize   = 4096
	btrfsMagic       = "_BHRfS_M"
)

var errNoBtrfs = errors.New("not the superblock of a btrfs")

// parseBtrfsSuper parses an untrusted superblock.
func parseBtrfsSuper(b []byte) (btrfsSuper, error) {
	if len(b) < btrfsSuperSize || !bytes.HasPrefix(b[0x40:], []byte(btrfsMagic)) {
		return btrfsSuper{}, errNoBtrfs
	}
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	s := btrfsSuper{
		uuid:      [16]byte(b[0x20:0x30]),
		devices:   u64(0x88),
		blockSize: uint64(binary.LittleEndian.Uint32(b[0x90:])),
		device:    u64(0xc9), // dev_item.devid
		bytes:     u64(0xd1), // dev_item.total_bytes
	}
	if s.blockSize < 512 || s.blockSize > 65536 || s.blockSize&(s.blockSize-1) != 0 || s.devices == 0 || s.device == 0 || s.bytes < s.blockSize || s.bytes > 1<<63 {
		return btrfsSuper{}, fmt.Errorf("btrfs superblock: device %d of %d with %d bytes in blocks of %d", s.device, s.devices, s.bytes, s.blockSize)
	}
	return s, nil
}

func (s btrfsSuper) geometry() Geometry {
	return Geometry{BlockSize: s.blockSize, Blocks: s.bytes / s.blockSize}
}

func readBtrfsSuper(disk *os.File) (btrfsSuper, error) {
	d, err := openDirect(disk.Name())
	if err != nil {
		return btrfsSuper{}, err
	}
	defer d.close()
	b, err := d.read(btrfsSuperSize, btrfsSuperOffset)
	if err != nil {
		return btrfsSuper{}, err
	}
	s, err := parseBtrfsSuper(b)
	if err != nil {
		return btrfsSuper{}, fmt.Errorf("%s: %w", disk.Name(), err)
	}
	return s, nil
}

func btrfsMountRefused(disk *os.File, err error) string {
	s, readErr := readBtrfsSuper(disk)
	switch {
	case readErr != nil:
		return ""
	case s.devices > 1:
		return fmt.Sprintf("it is a btrfs with %d devices, and a volume has one: remove the others from it, or mount it yourself", s.devices)
	case errors.Is(err, unix.EEXIST):
		return "a disk with the same UUID is mounted already: unmount that one, or detach this one and run on the host: btrfstune -u DISK"
	case errors.Is(err, unix.ENODEV):
		return "the guest's kernel has no btrfs: add its module to the image"
	case errors.Is(err, unix.EIO), errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
		return "its metadata is damaged or cannot be read: detach the disk and run on the host: btrfs check DISK, which reports the damage and changes nothing"
	}
	return ""
}
