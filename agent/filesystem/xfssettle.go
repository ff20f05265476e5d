package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Labels of a mounted filesystem (include/uapi/linux/fs.h).
const (
	fsIocGetLabel = 0x81009431 // _IOR(0x94, 49, char[256])
	fsIocSetLabel = 0x41009432 // _IOW(0x94, 50, char[256])
	fsLabelSize   = 256        // FSLABEL_MAX
)

// errNotWritten is of a superblock whose write the kernel has reported and nobody finds.
var errNotWritten = errors.New("the superblock on the disk is not written")

// xfsSettle has the kernel write the superblock, if the one on the disk is older than
// the growth, and the disk keep it.
//
// What writes it is to set the label that is set already: of all that user space can
// ask for, this alone writes the superblock and nothing else, at once (xfs_sync_sb_buf
// in xfs_ioc_setlabel, fs/xfs/xfs_ioctl.c, since Linux 4.18). Every other way, the
// kernel's own after half a minute among them, writes out all that is logged, in any
// order: a directory that names an inode in a new group may be there before the
// superblock that has the group, and after a cut between the two no kernel mounts the
// disk. FIFREEZE stops every writer too, for as long as anybody's write call takes.
func xfsSettle(ctx context.Context, m Mounted) error {
	if err := ctx.Err(); err != nil {
		return err
	}
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

// xfsSuperOnDisk reads past the page cache, which xfs writes past too.
func xfsSuperOnDisk(m Mounted) (xfsSuper, error) {
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return xfsSuper{}, os.NewSyscallError("mmap", err)
	}
	defer unix.Munmap(page)
	disk, err := os.OpenFile(m.Disk.Name(), os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return xfsSuper{}, err
	}
	defer disk.Close()
	if _, err := disk.ReadAt(page, 0); err != nil {
		return xfsSuper{}, err
	}
	super, err := parseXFSSuper(page)
	if err != nil {
		return xfsSuper{}, fmt.Errorf("%s: %w", disk.Name(), err)
	}
	return super, nil
}
