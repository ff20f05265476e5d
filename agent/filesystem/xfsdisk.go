package filesystem

import (
	"fmt"
	"os"
)

// xfsDisk is the disk of a mounted xfs.
type xfsDisk struct {
	Mounted
	*directDisk
}

// openXFSDisk opens the disk for reads past the page cache. The caller closes it.
func openXFSDisk(m Mounted) (*xfsDisk, error) {
	disk, err := openDirect(m.Disk.Name())
	if err != nil {
		return nil, err
	}
	if m.Proven == nil {
		m.Proven = &Proven{}
	}
	return &xfsDisk{m, disk}, nil
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
