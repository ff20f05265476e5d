package operation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
)

// ioctlShutdown is _IOR('X', 125, __u32): XFS_IOC_GOINGDOWN in the kernel's fs/xfs/libxfs/xfs_fs.h
// and EXT4_IOC_SHUTDOWN in its include/uapi/linux/ext4.h.
const ioctlShutdown = 0x8004587d

func statFS(_ context.Context, args remote.Path) (remote.StatFS, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(args.Path, &s); err != nil {
		return remote.StatFS{}, &os.PathError{Op: "statfs", Path: args.Path, Err: err}
	}
	return remote.StatFS{
		Type: int64(s.Type), BlockSize: int64(s.Bsize), Flags: int64(s.Flags),
		Blocks: s.Blocks, Free: s.Bfree, Available: s.Bavail, Files: s.Files, FilesFree: s.Ffree,
	}, nil
}

func deviceSize(_ context.Context, args remote.Path) (remote.Size, error) {
	f, err := os.Open(args.Path)
	if err != nil {
		return remote.Size{}, err
	}
	defer f.Close()
	var bytes uint64
	err = ioctl(f, "BLKGETSIZE64", unix.BLKGETSIZE64, unsafe.Pointer(&bytes))
	return remote.Size{Bytes: bytes}, err
}

// ioctlFiemap is _IOWR('f', 11, struct fiemap): FS_IOC_FIEMAP in the kernel's
// include/uapi/linux/fs.h.
const ioctlFiemap = 0xc020660b

// fiemap is struct fiemap with room for one struct fiemap_extent (include/uapi/linux/fiemap.h).
type fiemap struct {
	start, length        uint64
	flags, mapped, count uint32
	_                    uint32
	extent               struct {
		logical, physical, length uint64
		_                         [2]uint64
		flags                     uint32
		_                         [3]uint32
	}
}

func diskOffset(_ context.Context, args remote.Path) (remote.Offset, error) {
	f, err := os.Open(args.Path)
	if err != nil {
		return remote.Offset{}, err
	}
	defer f.Close()
	where := fiemap{length: 1, count: 1}
	if err := ioctl(f, "FS_IOC_FIEMAP", ioctlFiemap, unsafe.Pointer(&where)); err != nil {
		return remote.Offset{}, err
	}
	const nowhere = 0x2 | 0x4 | 0x8 | 0x200 // FIEMAP_EXTENT_UNKNOWN, DELALLOC, ENCODED, DATA_INLINE
	if where.mapped != 1 || where.extent.flags&nowhere != 0 {
		return remote.Offset{}, fmt.Errorf("%s: its content has no place on the disk: extents %d, flags %#x", args.Path, where.mapped, where.extent.flags)
	}
	start, err := partitionStart(f)
	return remote.Offset{Bytes: start + where.extent.physical}, err
}

// partitionStart returns where the partition below a file begins on its disk, in bytes; 0 of a
// whole disk.
func partitionStart(f *os.File) (uint64, error) {
	var s unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &s); err != nil {
		return 0, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	text, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/start", unix.Major(s.Dev), unix.Minor(s.Dev)))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	sectors, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return sectors * 512, err
}

func shutdownFS(args remote.ShutdownFS) error {
	f, err := os.Open(args.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	return ioctl(f, "shutdown", ioctlShutdown, unsafe.Pointer(&args.Flags))
}

// The ioctls that freeze and thaw, from the kernel's include/uapi/linux/fs.h: _IOWR('X', 119, int)
// and _IOWR('X', 120, int). The kernel ignores their argument.
const (
	ioctlFreeze = 0xc0045877
	ioctlThaw   = 0xc0045878
)

func freezeFS(args remote.Freeze) error {
	f, err := os.Open(args.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	var unused int32
	if err := ioctl(f, "FIFREEZE", ioctlFreeze, unsafe.Pointer(&unused)); err != nil {
		return err
	}
	return ioctl(f, "FITHAW", ioctlThaw, unsafe.Pointer(&unused))
}

func ioctl(f *os.File, name string, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
		return &os.PathError{Op: "ioctl " + name, Path: f.Name(), Err: errno}
	}
	return nil
}

func mount(args remote.Mount) error {
	if err := unix.Mount(args.Source, args.Target, args.FSType, args.Flags, args.Data); err != nil {
		return fmt.Errorf("mount %s %s on %s: %w", args.FSType, args.Source, args.Target, err)
	}
	return nil
}

func unmount(args remote.Unmount) error {
	if err := unix.Unmount(args.Path, args.Flags); err != nil {
		return &os.PathError{Op: "umount", Path: args.Path, Err: err}
	}
	return nil
}

func sync(args remote.Path) error {
	if args.Path == "" {
		unix.Sync()
		return nil
	}
	f, err := os.Open(args.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return &os.PathError{Op: "syncfs", Path: args.Path, Err: err}
	}
	return nil
}
