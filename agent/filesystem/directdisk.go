package filesystem

import (
	"os"

	"golang.org/x/sys/unix"
)

// directDisk reads a disk past the page cache of the block device, because xfs and newer versions
// of btrfs do not write through that cache.
type directDisk struct {
	file *os.File
	page []byte // aligned, and large enough for every read
}

// directBytes is enough for the headers of an xfs's group with the largest sectors.
const directBytes = 3 * 32 << 10

// openDirect opens a disk. The caller closes it.
func openDirect(disk string) (*directDisk, error) {
	page, err := unix.Mmap(-1, 0, directBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	file, err := openUnpolled(disk, unix.O_DIRECT)
	if err != nil {
		unix.Munmap(page)
		return nil, err
	}
	return &directDisk{file, page}, nil
}

func (d *directDisk) close() {
	d.file.Close()
	unix.Munmap(d.page)
}

// read returns bytes of the disk, at most directBytes. The result is valid until the next read.
func (d *directDisk) read(bytes int, at uint64) ([]byte, error) {
	page := os.Getpagesize()
	if _, err := d.file.ReadAt(d.page[:(bytes+page-1)/page*page], int64(at)); err != nil {
		return nil, err
	}
	return d.page[:bytes], nil
}
