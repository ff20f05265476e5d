package filesystem

import (
	"context"
	"errors"
	"fmt"
	"unsafe"
)

// Labels of a mounted filesystem (include/uapi/linux/fs.h).
const (
	fsIocGetLabel = 0x81009431 // _IOR(0x94, 49, char[256])
	fsIocSetLabel = 0x41009432 // _IOW(0x94, 50, char[256])
	fsLabelSize   = 256        // FSLABEL_MAX
)

// errNotWritten is returned when the label was set and the disk still has the old
// superblock.
var errNotWritten = errors.New("the superblock on the disk is not written")

// xfsSettle has the kernel write the superblock, if the one on the disk is older than
// the growth, and the disk keep it. One of somebody else's may have to be waited for
// (awaitWhole).
func xfsSettle(ctx context.Context, m Mounted) error {
	g, err := readXFSGeom(m)
	if err != nil {
		return err
	}
	if m.Proven != nil && m.Proven.kept >= g.dataBlocks() {
		return nil
	}
	d, err := openXFSDisk(m)
	if err != nil {
		return err
	}
	defer d.close()
	if err := d.settleFound(ctx, g); err != nil {
		return err
	}
	return d.keep()
}

// settleFound is settle of what the filesystem may have grown by before, by anybody.
func (d *xfsDisk) settleFound(ctx context.Context, g *xfsGeom) error {
	if d.Proven.blocks < g.dataBlocks() {
		if err := d.readSuper(); err != nil {
			return err
		}
	}
	return d.settle(ctx, g)
}

// settle returns when the superblock on the disk has all blocks of a geometry, and the
// disk may have it in its own cache still.
//
// Setting the current label again forces the log, then writes the primary superblock,
// then the other groups', and no other metadata (xfs_sync_sb_buf in xfs_ioc_setlabel,
// fs/xfs/xfs_ioctl.c, since Linux 4.18). Every other way, the kernel's own among them,
// writes out all that is logged, in any order: a directory that was in the log before
// the growth may be there with the name of an inode in a new group, and the superblock
// that has the group may not, and after a cut between the two no kernel mounts the
// disk. FIFREEZE stops every writer too, for as long as anybody's write call takes.
//
// A growth of the agent's own is settled also when ctx has ended: the kernel has made
// it by then.
func (d *xfsDisk) settle(ctx context.Context, g *xfsGeom) error {
	if d.Proven.blocks >= g.dataBlocks() {
		return nil
	}
	if err := d.awaitWhole(ctx, g, g.groups()-1); err != nil {
		return err
	}
	if err := xfsWriteSuper(d.Mounted); err != nil {
		return err
	}
	if err := d.readSuper(); err != nil {
		return err
	}
	if d.Proven.blocks < g.dataBlocks() {
		return fmt.Errorf("xfs on %s: %w", d.Disk.Name(), errNotWritten)
	}
	return nil
}

// xfsWriteSuper writes the superblock. Who sets another label in the moment between
// the two calls loses it.
func xfsWriteSuper(m Mounted) error {
	var label [fsLabelSize]byte
	if err := ioctl(m, "FS_IOC_GETFSLABEL", fsIocGetLabel, unsafe.Pointer(&label)); err != nil {
		return err
	}
	return ioctl(m, "FS_IOC_SETFSLABEL", fsIocSetLabel, unsafe.Pointer(&label))
}
