package ops

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/act"
)

// The ioctls that grow: EXT4_IOC_RESIZE_FS of the kernel's include/uapi/linux/ext4.h, which takes a count of blocks, and XFS_IOC_FSGEOMETRY
// and XFS_IOC_FSGROWFSDATA of its fs/xfs/libxfs/xfs_fs.h.
const (
	ioctlExt4Resize  = 0x40086610
	ioctlXFSGeometry = 0x8100587e
	ioctlXFSGrow     = 0x4010586e
)

// growFS times the ioctl alone.
func growFS(_ context.Context, args act.Grow) (act.Grown, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(args.Path, &s); err != nil {
		return act.Grown{}, &os.PathError{Op: "statfs", Path: args.Path, Err: err}
	}
	f, err := os.Open(args.Path)
	if err != nil {
		return act.Grown{}, err
	}
	defer f.Close()
	blocks := args.Bytes / uint64(s.Bsize)
	switch args.FSType {
	case "ext4":
		return timedIoctl(f, "EXT4_IOC_RESIZE_FS", ioctlExt4Resize, unsafe.Pointer(&blocks))
	case "xfs":
		var geometry [256]byte // struct xfs_fsop_geom: imaxpct at 28, datablocks at 32
		if err := ioctl(f, "XFS_IOC_FSGEOMETRY", ioctlXFSGeometry, unsafe.Pointer(&geometry)); err != nil {
			return act.Grown{}, err
		}
		if has := binary.NativeEndian.Uint64(geometry[32:]); blocks < has { // the kernel would obey
			return act.Grown{}, fmt.Errorf("grow %s: it has %d blocks, and %d were asked for", args.Path, has, blocks)
		}
		grow := struct { // struct xfs_growfs_data
			blocks  uint64
			imaxpct uint32
			_       uint32
		}{blocks: blocks, imaxpct: binary.NativeEndian.Uint32(geometry[28:])}
		return timedIoctl(f, "XFS_IOC_FSGROWFSDATA", ioctlXFSGrow, unsafe.Pointer(&grow))
	default:
		return act.Grown{}, fmt.Errorf("grow %s: no ioctl is known for %.40q", args.Path, args.FSType)
	}
}

func timedIoctl(f *os.File, name string, request uintptr, arg unsafe.Pointer) (act.Grown, error) {
	began := time.Now()
	err := ioctl(f, name, request, arg)
	return act.Grown{Nanoseconds: time.Since(began).Nanoseconds()}, err
}
