package operation

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
)

// The ioctls that grow a filesystem: EXT4_IOC_RESIZE_FS of the kernel's include/uapi/linux/ext4.h,
// which takes a number of blocks, XFS_IOC_FSGEOMETRY and XFS_IOC_FSGROWFSDATA of its
// fs/xfs/libxfs/xfs_fs.h, and BTRFS_IOC_RESIZE of its include/uapi/linux/btrfs.h.
const (
	ioctlExt4Resize  = 0x40086610
	ioctlXFSGeometry = 0x8100587e
	ioctlXFSGrow     = 0x4010586e
	ioctlBtrfsResize = 0x50009403
)

// The ioctls that read and set a label of 256 bytes (include/uapi/linux/fs.h, FSLABEL_MAX).
const (
	ioctlGetLabel = 0x81009431
	ioctlSetLabel = 0x41009432
	labelBytes    = 256
)

// growFS grows a filesystem. It measures only the time of the ioctl and of the calls that settle
// the growth.
func growFS(_ context.Context, args remote.Grow) (remote.Grown, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(args.Path, &s); err != nil {
		return remote.Grown{}, &os.PathError{Op: "statfs", Path: args.Path, Err: err}
	}
	f, err := os.Open(args.Path)
	if err != nil {
		return remote.Grown{}, err
	}
	defer f.Close()
	blocks := args.Bytes / uint64(s.Bsize)
	switch args.FSType {
	case "ext4":
		return timed(func() error { return ioctl(f, "EXT4_IOC_RESIZE_FS", ioctlExt4Resize, unsafe.Pointer(&blocks)) })
	case "xfs":
		var geometry [256]byte // struct xfs_fsop_geom: imaxpct at 28, datablocks at 32
		if err := ioctl(f, "XFS_IOC_FSGEOMETRY", ioctlXFSGeometry, unsafe.Pointer(&geometry)); err != nil {
			return remote.Grown{}, err
		}
		if has := binary.NativeEndian.Uint64(geometry[32:]); blocks < has { // the kernel would shrink it
			return remote.Grown{}, fmt.Errorf("grow %s: it has %d blocks, and %d were asked for", args.Path, has, blocks)
		}
		grow := struct { // struct xfs_growfs_data
			blocks  uint64
			imaxpct uint32
			_       uint32
		}{blocks: blocks, imaxpct: binary.NativeEndian.Uint32(geometry[28:])}
		growIt := func() error { return ioctl(f, "XFS_IOC_FSGROWFSDATA", ioctlXFSGrow, unsafe.Pointer(&grow)) }
		if args.Settle == "" {
			return timed(growIt)
		}
		blockSize, groupBlocks := uint64(binary.NativeEndian.Uint32(geometry[0:])), uint64(binary.NativeEndian.Uint32(geometry[8:]))
		last := (binary.NativeEndian.Uint64(geometry[32:]) - 1) / groupBlocks * groupBlocks * blockSize
		return timed(func() error { return settledXFS(f, args.Settle, last, growIt) })
	case "btrfs":
		var to [4096]byte // struct btrfs_ioctl_vol_args: name at 8
		copy(to[8:], fmt.Sprintf("1:%d", args.Bytes))
		return timed(func() error { return ioctl(f, "BTRFS_IOC_RESIZE", ioctlBtrfsResize, unsafe.Pointer(&to)) })
	default:
		return remote.Grown{}, fmt.Errorf("grow %s: no ioctl is known for %.40q", args.Path, args.FSType)
	}
}

// settledXFS grows an xfs so that it survives a power cut. First it checks that the superblock and
// the last group's header, which begins at last, are on the disk. After the growth it makes the
// kernel write the superblock, checks that this happened, and flushes the disk.
func settledXFS(f *os.File, device string, last uint64, grow func() error) (err error) {
	disk, err := os.OpenFile(device, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer unix.Munmap(page)
	var label [labelBytes]byte
	for _, step := range []func() error{
		func() error { _, err := disk.ReadAt(page, 0); return err },
		func() error { _, err := disk.ReadAt(page, int64(last)); return err },
		grow,
		func() error { return ioctl(f, "FS_IOC_GETFSLABEL", ioctlGetLabel, unsafe.Pointer(&label)) },
		func() error { return ioctl(f, "FS_IOC_SETFSLABEL", ioctlSetLabel, unsafe.Pointer(&label)) },
		func() error { _, err := disk.ReadAt(page, 0); return err },
		disk.Sync,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func timed(do func() error) (remote.Grown, error) {
	began := time.Now()
	err := do()
	return remote.Grown{Nanoseconds: time.Since(began).Nanoseconds()}, err
}
