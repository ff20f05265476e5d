package filesystem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"

	"golang.org/x/sys/unix"
)

// xfsSuper has the fields of struct xfs_dsb (fs/xfs/libxfs/xfs_format.h) that are used. Each
// allocation group begins with such a superblock. All fields are big-endian.
type xfsSuper struct {
	blockSize   uint64
	blocks      uint64 // of the whole filesystem
	uuid        [16]byte
	groupBlocks uint64
	groups      uint64
}

// xfsSuperSize is the size of the part that holds these fields.
const xfsSuperSize = 96

var errNoXFS = errors.New("not the superblock of an xfs")

// parseXFSSuper parses an untrusted superblock.
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

// readXFSSuper reads the superblock at offset at, where a group begins.
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

// grownTo returns the size, in blocks, that the filesystem on a disk was growing to when it was
// interrupted, or 0. growfs writes superblocks with the new size into the new groups before it
// commits, and into the old groups afterwards; the primary superblock follows with the log.
func (s xfsSuper) grownTo(disk *os.File) (blocks uint64) {
	for _, group := range []uint64{s.groups, 1} { // the first new group, and an old one
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

// xfsMountRefused recognizes a disk that older kernels cannot recover: the growth was interrupted
// before the primary superblock was written, and the log uses the new space. (Since "xfs: update
// the file system geometry after recoverying superblock buffers", 2024, the kernel uses the
// superblock in the log.)
func xfsMountRefused(disk *os.File, err error) string {
	if errors.Is(err, unix.EBADMSG) || errors.Is(err, unix.EIO) {
		return "its metadata is damaged or cannot be read: detach the disk and run on the host: xfs_repair -n DISK, which reports the damage and changes nothing"
	}
	if !errors.Is(err, unix.EUCLEAN) {
		return ""
	}
	const rescue = "detach the disk and run on the host: directvol rescue DISK. It boots a newer kernel, which recovers the disk"
	if fault := xfsSuperFault(disk); fault != "" {
		return fault + ": detach the disk and run on the host: xfs_repair -n DISK, which reports the damage and changes nothing, then xfs_repair DISK"
	}
	super, readErr := readXFSSuper(disk, 0)
	if readErr != nil {
		return ""
	}
	if to := super.grownTo(disk); to != 0 {
		return fmt.Sprintf("its growth from %d to %d bytes was cut off, which this kernel cannot recover: %s", super.blocks*super.blockSize, to*super.blockSize, rescue)
	}
	return "if it was cut off within a minute of a growth, this kernel cannot recover it: " + rescue
}

// Offsets and values in struct xfs_dsb (fs/xfs/libxfs/xfs_format.h) for which a kernel refuses to
// mount.
const (
	xfsSuperSector     = 102 // sb_sectsize
	xfsSuperVersion    = 100 // sb_versionnum
	xfsSuperInProgress = 126 // sb_inprogress
	xfsSuperIncompat   = 216 // sb_features_incompat
	xfsSuperCRC        = 224 // sb_crc, little-endian; computed over the sector with this field zeroed
	xfsNeedsRepair     = 1 << 4
	xfsLargestSector   = 32 << 10
)

// xfsSuperFault describes a fault in the superblock itself, or returns "".
func xfsSuperFault(disk *os.File) string {
	sector := make([]byte, xfsLargestSector)
	n, _ := disk.ReadAt(sector, 0) // less on a small disk
	return xfsFaultOf(sector[:n])
}

// xfsFaultOf is xfsSuperFault for a disk's first bytes, which are untrusted.
func xfsFaultOf(b []byte) string {
	if len(b) < xfsSuperCRC+4 {
		return ""
	}
	size := int(binary.BigEndian.Uint16(b[xfsSuperSector:]))
	five := binary.BigEndian.Uint16(b[xfsSuperVersion:])&0xf == 5
	if five && (size < 512 || size > len(b) || size&(size-1) != 0) {
		return fmt.Sprintf("its superblock is damaged: it has sectors of %d bytes", size)
	}
	switch {
	case five && xfsChecksum(b[:size]) != binary.LittleEndian.Uint32(b[xfsSuperCRC:]):
		return "its superblock is damaged: the checksum does not match"
	case b[xfsSuperInProgress] != 0:
		return "the mkfs.xfs or xfs_copy that made it did not finish (inprogress)"
	case five && binary.BigEndian.Uint32(b[xfsSuperIncompat:])&xfsNeedsRepair != 0:
		return "it is marked as needing repair (needsrepair)"
	}
	return ""
}

// xfsChecksum returns the checksum of a superblock's sector (fs/xfs/libxfs/xfs_cksum.h).
func xfsChecksum(sector []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	sum := crc32.Update(0, table, sector[:xfsSuperCRC])
	sum = crc32.Update(sum, table, make([]byte, 4))
	return crc32.Update(sum, table, sector[xfsSuperCRC+4:])
}
