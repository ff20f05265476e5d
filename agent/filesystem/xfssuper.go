package filesystem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// xfsSuper is what is used of struct xfs_dsb (fs/xfs/libxfs/xfs_format.h), of
// which each allocation group begins with one. All of it is big-endian.
type xfsSuper struct {
	blockSize   uint64
	blocks      uint64 // of the whole filesystem
	uuid        [16]byte
	groupBlocks uint64
	groups      uint64
}

// xfsSuperSize is as much of it as holds those fields.
const xfsSuperSize = 96

var errNoXFS = errors.New("no superblock of an xfs")

// parseXFSSuper reads a superblock that anyone may have written.
func parseXFSSuper(b []byte) (xfsSuper, error) {
	if len(b) < xfsSuperSize || !bytes.HasPrefix(b, []byte("XFSB")) {
		return xfsSuper{}, errNoXFS
	}
	s := xfsSuper{
		blockSize:   uint64(binary.BigEndian.Uint32(b[4:])),
		blocks:      binary.BigEndian.Uint64(b[8:]),
		uuid:        [16]byte(b[32:48]),
		groupBlocks: uint64(binary.BigEndian.Uint32(b[84:])),
		groups:      uint64(binary.BigEndian.Uint32(b[88:])),
	}
	if s.blockSize < 512 || s.blockSize > 65536 || s.blockSize&(s.blockSize-1) != 0 || s.groupBlocks == 0 || s.groups == 0 ||
		s.groups > (1<<62)/s.blockSize/s.groupBlocks {
		return xfsSuper{}, fmt.Errorf("xfs superblock: %d groups of %d blocks of %d bytes", s.groups, s.groupBlocks, s.blockSize)
	}
	return s, nil
}

// readXFSSuper reads the superblock at the beginning of a group.
func readXFSSuper(disk *os.File, at uint64) (xfsSuper, error) {
	var b [xfsSuperSize]byte
	if _, err := disk.ReadAt(b[:], int64(at)); err != nil {
		return xfsSuper{}, err
	}
	return parseXFSSuper(b[:])
}

func xfsUUID(disk *os.File) (string, error) {
	s, err := readXFSSuper(disk, 0)
	return textOf(s.uuid), err
}

func xfsEndOnDisk(disk *os.File) (uint64, error) {
	s, err := readXFSSuper(disk, 0)
	return s.blocks, err
}

// grownTo returns the size, in blocks, that the filesystem on a disk was growing
// to when it was cut off, or 0. growfs gives the new groups superblocks with the
// new size before it commits, and those of the old ones after; the primary one
// follows with the log.
func (s xfsSuper) grownTo(disk *os.File) (blocks uint64) {
	for _, group := range []uint64{s.groups, 1} { // the first new one, an old one
		other, err := readXFSSuper(disk, group*s.groupBlocks*s.blockSize)
		if err == nil && other.uuid == s.uuid && other.blockSize == s.blockSize {
			blocks = max(blocks, other.blocks)
		}
	}
	if blocks <= s.blocks {
		return 0
	}
	return blocks
}

// xfsMountRefused knows what older kernels cannot recover: a growth that was cut
// off before the primary superblock was written, with use of the new space in
// the log. (Since "xfs: update the file system geometry after recoverying
// superblock buffers", 2024, the kernel goes by the superblock in the log.)
func xfsMountRefused(disk *os.File, err error) string {
	if errors.Is(err, unix.EBADMSG) || errors.Is(err, unix.EIO) {
		return "its metadata is damaged, or cannot be read: detach it and run on the host: xfs_repair -n DISK, which changes nothing and says what is wrong"
	}
	if !errors.Is(err, unix.EUCLEAN) {
		return ""
	}
	const rescue = "detach it and run on the host: directvol rescue DISK. That boots a newer kernel, which recovers the disk"
	super, readErr := readXFSSuper(disk, 0)
	if readErr != nil {
		return ""
	}
	if to := super.grownTo(disk); to != 0 {
		return fmt.Sprintf("it was cut off while it grew from %d to %d bytes, which this kernel cannot recover: %s", super.blocks*super.blockSize, to*super.blockSize, rescue)
	}
	return "if it was cut off within a minute of a growth, this kernel cannot recover it: " + rescue
}
