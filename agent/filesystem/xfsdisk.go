package filesystem

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// xfsDisk is what is on the disk of a mounted xfs, and not in its page cache, which xfs
// writes past.
type xfsDisk struct {
	Mounted
	direct *os.File
	page   []byte // aligned, as long as any sectors that are read

	super xfsSuper // as it was read last
	// whole is the first group whose header's length is still to be looked at. The superblock
	// on the disk has groups behind each of those before it, or their headers were read.
	whole uint64
}

// xfsDiskBytes are enough for a group's headers with the largest sectors.
const xfsDiskBytes = 3 * 32 << 10

// openXFSDisk opens the disk for reads past the page cache. The caller closes it.
func openXFSDisk(m Mounted) (*xfsDisk, error) {
	page, err := unix.Mmap(-1, 0, xfsDiskBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	direct, err := os.OpenFile(m.Disk.Name(), os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		unix.Munmap(page)
		return nil, err
	}
	return &xfsDisk{Mounted: m, direct: direct, page: page}, nil
}

func (d *xfsDisk) close() {
	d.direct.Close()
	unix.Munmap(d.page)
}

// read returns so many bytes of the disk, at most xfsDiskBytes, until the next read.
func (d *xfsDisk) read(bytes int, at uint64) ([]byte, error) {
	page := os.Getpagesize()
	if _, err := d.direct.ReadAt(d.page[:(bytes+page-1)/page*page], int64(at)); err != nil {
		return nil, err
	}
	return d.page[:bytes], nil
}

// readSuper reads the superblock.
func (d *xfsDisk) readSuper() error {
	b, err := d.read(xfsSuperSize, 0)
	if err != nil {
		return err
	}
	super, err := parseXFSSuper(b)
	if err != nil {
		return fmt.Errorf("%s: %w", d.Disk.Name(), err)
	}
	d.super, d.whole = super, max(d.whole, super.groups-1)
	return nil
}
