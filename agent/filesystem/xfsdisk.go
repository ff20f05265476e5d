package filesystem

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// xfsDisk reads the disk of a mounted xfs past the page cache of the block device, because xfs does
// not write through that cache.
type xfsDisk struct {
	Mounted
	direct *os.File
	page   []byte // aligned, and large enough for every read
}

// xfsDiskBytes is enough for a group's headers with the largest sectors.
const xfsDiskBytes = 3 * 32 << 10

// openXFSDisk opens the disk for reads past the page cache. The caller closes it.
func openXFSDisk(m Mounted) (*xfsDisk, error) {
	page, err := unix.Mmap(-1, 0, xfsDiskBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	direct, err := openUnpolled(m.Disk.Name(), unix.O_DIRECT)
	if err != nil {
		unix.Munmap(page)
		return nil, err
	}
	if m.Proven == nil {
		m.Proven = &Proven{}
	}
	return &xfsDisk{m, direct, page}, nil
}

func (d *xfsDisk) close() {
	d.direct.Close()
	unix.Munmap(d.page)
}

// read returns bytes of the disk, at most xfsDiskBytes. The result is valid until the next read.
func (d *xfsDisk) read(bytes int, at uint64) ([]byte, error) {
	page := os.Getpagesize()
	if _, err := d.direct.ReadAt(d.page[:(bytes+page-1)/page*page], int64(at)); err != nil {
		return nil, err
	}
	return d.page[:bytes], nil
}

// xfsOnDisk returns the extent according to the superblock on the disk.
func xfsOnDisk(disk *os.File) (Geometry, error) {
	d, err := openXFSDisk(Mounted{Disk: disk})
	if err != nil {
		return Geometry{}, err
	}
	defer d.close()
	super, err := d.super()
	return Geometry{BlockSize: super.blockSize, Blocks: super.blocks, GroupBlocks: super.groupBlocks}, err
}

// super reads the superblock.
func (d *xfsDisk) super() (xfsSuper, error) {
	b, err := d.read(xfsSuperSize, 0)
	if err != nil {
		return xfsSuper{}, err
	}
	super, err := parseXFSSuper(b)
	if err != nil {
		return xfsSuper{}, fmt.Errorf("%s: %w", d.Disk.Name(), err)
	}
	return super, nil
}

// readSuper notes the size in the superblock on the disk. That says nothing about the groups'
// headers: after somebody else's growth, the kernel may write them later.
func (d *xfsDisk) readSuper() error {
	super, err := d.super()
	if err != nil {
		return err
	}
	d.Proven.blocks = super.blocks
	return nil
}

// keep flushes the disk's cache.
func (d *xfsDisk) keep() error {
	err := d.Disk.Sync()
	if err == nil {
		d.Proven.kept = d.Proven.blocks
	}
	return err
}
