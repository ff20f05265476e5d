package filesystem

import (
	"context"
	"errors"
	"fmt"
	"unsafe"
)

// Ioctls for the label of a mounted filesystem (include/uapi/linux/fs.h).
const (
	fsIocGetLabel = 0x81009431 // _IOR(0x94, 49, char[256])
	fsIocSetLabel = 0x41009432 // _IOW(0x94, 50, char[256])
	fsLabelSize   = 256        // FSLABEL_MAX
)

// errNotWritten means that the label was set but the disk still has the old superblock.
var errNotWritten = errors.New("the superblock on the disk is not written")

// xfsSettle makes the kernel write the superblock if the one on the disk is older than the growth,
// and flushes the disk's cache. After somebody else's growth it may have to wait first
// (awaitWhole).
func xfsSettle(ctx context.Context, m Mounted) error {
	g, err := readXFSGeom(m)
	if err != nil {
		return err
	}
	if m.Proven != nil && m.Proven.kept >= g.dataBlocks() && !m.Proven.stale {
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

// settleFound is settle for earlier growths by anybody. It reads the headers of all groups that
// were not proven yet, because any of them may have been a short last group before a growth, and
// the superblock of each, once for a mount (isWhole). It stops when ctx ends; a later call goes on
// from there.
func (d *xfsDisk) settleFound(ctx context.Context, g *xfsGeom) error {
	if err := d.findWhole(ctx, g, g.groups()-1); err != nil { // settle waits for the first one that is short
		return err
	}
	if d.Proven.blocks < g.dataBlocks() {
		if err := d.readSuper(); err != nil {
			return err
		}
	}
	if !d.Proven.compared {
		if _, err := d.isWhole(g, g.groups()-1); err != nil { // it may be short
			return err
		}
		d.Proven.compared = true
	}
	return d.settle(ctx, g)
}

// settle returns when the superblock on the disk has all blocks of a geometry, and the headers of
// all groups before the last one have their full length. They may still be in the disk's own cache.
//
// Setting the current label again forces the log, then writes the primary superblock, then those of
// the other groups, and no other metadata (xfs_sync_sb_buf in xfs_ioc_setlabel, fs/xfs/xfs_ioctl.c,
// since Linux 4.18). Every other way, including the kernel's own, writes all logged metadata in any
// order. A directory that was in the log before the growth may then be on the disk with the name of
// an inode in a new group, while the superblock with that group is not: after a power cut at this
// moment no kernel mounts the disk. FIFREEZE also stops every writer, for as long as any write call
// takes.
//
// If the superblock of a group cannot be written, settle fails until that succeeds, although the
// primary one has the size: xfs_repair compares them.
//
// A growth by the agent itself is settled even if ctx has ended, because the kernel has already
// made it.
func (d *xfsDisk) settle(ctx context.Context, g *xfsGeom) error {
	if err := d.awaitWhole(ctx, g, g.groups()-1); err != nil || d.Proven.blocks >= g.dataBlocks() && !d.Proven.stale {
		return err
	}
	err := xfsWriteSuper(d.Mounted)
	if d.Proven.stale = err != nil; err != nil {
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

// xfsWriteSuper writes the superblock. A label that somebody else sets between the two calls is
// lost.
func xfsWriteSuper(m Mounted) error {
	var label [fsLabelSize]byte
	if err := ioctl(m, "FS_IOC_GETFSLABEL", fsIocGetLabel, unsafe.Pointer(&label)); err != nil {
		return err
	}
	return ioctl(m, "FS_IOC_SETFSLABEL", fsIocSetLabel, unsafe.Pointer(&label))
}
