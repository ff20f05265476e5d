package blockdev

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Partition is a part of a disk, in sectors of 512 bytes whatever the disk's own sector size is
// (include/linux/types.h), as in sysfs and in the kernel's log.
type Partition struct {
	Disk           string // the kernel's name of the whole disk
	Start, Sectors uint64
}

// Has reports whether a sector of the disk belongs to the partition.
func (p Partition) Has(sector uint64) bool { return sector >= p.Start && sector-p.Start < p.Sectors }

// PartitionOf returns the partition with a dev_t as it is now. It returns false if the device is no
// partition, or if the kernel does not show its position (Documentation/ABI/stable/sysfs-block).
// root is "/" outside of tests. PartitionOf does not access the disk.
func PartitionOf(root string, number uint64) (Partition, bool) {
	dir := numberDir(root, number)
	target, err := os.Readlink(dir)
	if _, no := os.Stat(filepath.Join(dir, "partition")); err != nil || no != nil {
		return Partition{}, false
	}
	start, err1 := readCount(filepath.Join(dir, "start"))
	sectors, err2 := readCount(filepath.Join(dir, "size"))
	return Partition{filepath.Base(filepath.Dir(target)), start, sectors}, err1 == nil && err2 == nil
}

func readCount(file string) (uint64, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSuffix(string(text), "\n"), 10, 64)
}
