package vm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// CopySparse copies an image, without the parts that were never written.
func CopySparse(to, from string) error { return CopySparseMoved(to, from, 0) }

// CopySparseMoved is CopySparse to a place that lies by bytes further behind. If by is negative,
// that many bytes at the beginning are left out.
func CopySparseMoved(to, from string, by int64) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	info, err := in.Stat()
	if err == nil {
		err = out.Truncate(info.Size() + by)
	}
	for at := max(0, -by); err == nil && at < info.Size(); {
		at, err = copyData(out, in, at, by)
	}
	if errors.Is(err, unix.ENXIO) { // no more data
		err = nil
	}
	return errors.Join(err, out.Close())
}

// copyData copies the first run of data at or after an offset of in to a place that lies by bytes
// further behind, and returns the offset of its end.
func copyData(out, in *os.File, at, by int64) (int64, error) {
	data, err := in.Seek(at, unix.SEEK_DATA)
	if err != nil {
		return 0, err
	}
	hole, err := in.Seek(data, unix.SEEK_HOLE)
	if err != nil {
		return 0, err
	}
	if _, err := in.Seek(data, io.SeekStart); err != nil {
		return 0, err
	}
	if _, err := out.Seek(data+by, io.SeekStart); err != nil {
		return 0, err
	}
	_, err = io.CopyN(out, in, hole-data)
	return hole, err
}

// superblocks are the places of the filesystems' superblocks on a disk.
var superblocks = map[string]struct {
	offset int64
	size   func([]byte) (uint64, bool)
}{
	"btrfs": {64 << 10, btrfsSize},
	"ext3":  {1024, ext4Size},
	"ext4":  {1024, ext4Size},
	"xfs":   {0, xfsSize},
}

// SuperblockBytes is the length of the part of a superblock that is read.
const SuperblockBytes = 512

// SuperblockOffset returns the offset of a filesystem's first superblock.
func SuperblockOffset(fstype string) int64 { return superblocks[fstype].offset }

// FilesystemSize returns the size in bytes that a filesystem's first superblock states.
func FilesystemSize(fstype string, disk io.ReaderAt) (uint64, error) {
	super := superblocks[fstype]
	var raw [SuperblockBytes]byte
	if _, err := disk.ReadAt(raw[:], super.offset); err != nil {
		return 0, fmt.Errorf("read the superblock: %w", err)
	}
	size, ok := super.size(raw[:])
	if !ok {
		return 0, fmt.Errorf("no superblock of %s", fstype)
	}
	return size, nil
}

// SizeOnDisk returns FilesystemSize of an image.
func SizeOnDisk(fstype, path string) (uint64, error) {
	image, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer image.Close()
	size, err := FilesystemSize(fstype, image)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return size, nil
}

// has64bit is EXT4_FEATURE_INCOMPAT_64BIT.
const has64bit = 0x80

// ext4Size reads struct ext4_super_block (fs/ext4/ext4.h).
func ext4Size(super []byte) (uint64, bool) {
	shift := binary.LittleEndian.Uint32(super[24:])
	if binary.LittleEndian.Uint16(super[56:]) != 0xef53 || shift > 6 {
		return 0, false
	}
	blocks := uint64(binary.LittleEndian.Uint32(super[4:]))
	if binary.LittleEndian.Uint32(super[96:])&has64bit != 0 {
		blocks |= uint64(binary.LittleEndian.Uint32(super[0x150:])) << 32
	}
	return blocks << (10 + shift), true
}

// xfsSize reads struct xfs_dsb (fs/xfs/libxfs/xfs_format.h).
func xfsSize(super []byte) (uint64, bool) {
	block := binary.BigEndian.Uint32(super[4:])
	if string(super[:4]) != "XFSB" || block < 512 || block > 65536 {
		return 0, false
	}
	return binary.BigEndian.Uint64(super[8:]) * uint64(block), true
}

// btrfsSize reads struct btrfs_super_block (include/uapi/linux/btrfs_tree.h): the magic at 0x40,
// dev_item.total_bytes at 0xd1.
func btrfsSize(super []byte) (uint64, bool) {
	return binary.LittleEndian.Uint64(super[0xd1:]), string(super[0x40:0x48]) == "_BHRfS_M"
}

// WholeSize returns a larger size to grow to. It is a multiple of every group's size, so that no
// part of it stays unused.
func WholeSize(had uint64) uint64 {
	const step = 128 << 20
	return (had/step + 2) * step
}
