package filesystem

import (
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

// errNotWritten is where the label was set and the superblock on the disk is still
// the old one.
var errNotWritten = errors.New("the superblock on the disk is not written")

// xfsSettle has the kernel write the superblock, if the one on the disk is older than
// the growth, and the disk keep it.
//
// What writes it is to set the label that is set already: that makes the log durable,
// writes the primary superblock, and then the other groups', and no other metadata
// (xfs_sync_sb_buf in xfs_ioc_setlabel, fs/xfs/xfs_ioctl.c, since Linux 4.18). Every
// other way, the kernel's own after half a minute among them, writes out all that is
// logged, in any order: a directory that names an inode in a new group may be there
// before the superblock that has the group, and after a cut between the two no kernel
// mounts the disk. FIFREEZE stops every writer too, for as long as anybody's write
// call takes.
//
// It goes on when the caller's time is over: the kernel has grown it by then.
func xfsSettle(m Mounted) error {
	g, err := readXFSGeom(m)
	if err != nil {
		return err
	}
	super, err := xfsSuperOnDisk(m)
	if err == nil && super.blocks < g.dataBlocks() {
		if err := xfsWriteSuper(m); err != nil {
			return err
		}
		if super, err = xfsSuperOnDisk(m); err == nil && super.blocks < g.dataBlocks() {
			err = fmt.Errorf("xfs on %s: %w", m.Disk.Name(), errNotWritten)
		}
	}
	if err != nil {
		return err
	}
	return m.Disk.Sync() // out of the disk's own cache
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

func xfsSuperOnDisk(m Mounted) (xfsSuper, error) {
	b := make([]byte, xfsSuperSize)
	if err := readPastCache(m, b, 0); err != nil {
		return xfsSuper{}, err
	}
	super, err := parseXFSSuper(b)
	if err != nil {
		return xfsSuper{}, fmt.Errorf("%s: %w", m.Disk.Name(), err)
	}
	return super, nil
}
