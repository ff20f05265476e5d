package filesystem

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/guestinit"
	"github.com/directvol/directvol/protocols/modulelist"
)

// btrfs grows by BTRFS_IOC_RESIZE (include/uapi/linux/btrfs.h). The kernel also shrinks by this
// call if the size in the request is smaller than the present one, which another grower may have
// raised since it was read. So each request names the number of bytes to add, and never a size.
//
// The call only notes the size and commits the transaction; its time does not depend on the size,
// and one step is enough. It ignores the result of the commit, so the agent looks for the new size
// in the superblock on the disk, and has the transaction committed again if it is not there.
//
// A btrfs has a size on each of its devices, and uses space as its profile allows. It is not known
// which device a request for a volume means if there are several: such a volume is refused.
var btrfs = Type{
	Name: "btrfs", Geometry: btrfsGeometry, OnDisk: btrfsOnDisk, Goal: func(_ Geometry, blocks, _ uint64) uint64 { return blocks }, CanGrow: btrfsCanGrow, Grow: btrfsGrow,
	BeforeMount: btrfsLoad, Checkpoint: noCheckpoint, Settle: btrfsSettle, Options: func(*os.File) string { return "" },
	RecordedErrors: func(*os.File) (uint64, error) { return 0, nil },
	Faults:         Faults{Repair: "btrfs check", StopsReadOnly: true, Stopped: btrfsStopped},
	EndOnDisk:      btrfsEndOnDisk,
	UUID:           btrfsUUID,
	MountRefused:   btrfsMountRefused,
	TrimsWhole:     true,
}

// Ioctls of include/uapi/linux/btrfs.h.
const (
	btrfsIocResize    = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
	btrfsIocWaitSync  = 0x40089416 // _IOW(0x94, 22, __u64): a transaction's number
	btrfsIocStartSync = 0x80089418 // _IOR(0x94, 24, __u64)
	btrfsIocDevInfo   = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
	btrfsIocFSInfo    = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)

	// btrfsBusy is BTRFS_ERROR_DEV_EXCL_RUN_IN_PROGRESS, which BTRFS_IOC_RESIZE returns without an
	// errno.
	btrfsBusy = 8

	// btrfsLeastBytes is the least size that the kernel resizes to.
	btrfsLeastBytes = 256 << 20
)

func btrfsOnDisk(disk *os.File) (Geometry, error) {
	s, err := readBtrfsSuper(disk)
	if err != nil {
		return Geometry{}, err
	}
	return s.geometry(), nil
}

func btrfsEndOnDisk(disk *os.File) (uint64, error) {
	g, err := btrfsOnDisk(disk)
	return g.Blocks, err
}

func btrfsUUID(disk *os.File) (string, error) {
	s, err := readBtrfsSuper(disk)
	return textOf(s.uuid), err
}

// btrfsMounted returns the superblock's fields as the kernel has them in memory.
func btrfsMounted(m Mounted) (btrfsSuper, error) {
	var info [1024]byte // struct btrfs_ioctl_fs_info_args
	if err := ioctl(m, "BTRFS_IOC_FS_INFO", btrfsIocFSInfo, unsafe.Pointer(&info)); err != nil {
		return btrfsSuper{}, err
	}
	s, err := readBtrfsSuper(m.Disk)
	if err != nil {
		return btrfsSuper{}, err
	}
	s.devices = binary.NativeEndian.Uint64(info[8:])
	s.blockSize = uint64(binary.NativeEndian.Uint32(info[36:]))
	var device [4096]byte // struct btrfs_ioctl_dev_info_args
	binary.NativeEndian.PutUint64(device[:], s.device)
	if err := ioctl(m, "BTRFS_IOC_DEV_INFO", btrfsIocDevInfo, unsafe.Pointer(&device)); err != nil {
		return btrfsSuper{}, err
	}
	s.bytes = binary.NativeEndian.Uint64(device[32:])
	if s.blockSize == 0 || s.bytes > 1<<63 {
		return btrfsSuper{}, fmt.Errorf("btrfs at %s has %d bytes in blocks of %d", m.Disk.Name(), s.bytes, s.blockSize)
	}
	return s, nil
}

func btrfsGeometry(m Mounted) (Geometry, error) {
	s, err := btrfsMounted(m)
	if err != nil {
		return Geometry{}, err
	}
	return s.geometry(), nil
}

func btrfsCanGrow(m Mounted, blocks uint64) error {
	s, err := btrfsMounted(m)
	if err != nil {
		return err
	}
	return s.canGrow(m.Disk.Name(), blocks)
}

func (s btrfsSuper) canGrow(disk string, blocks uint64) error {
	switch {
	case blocks <= s.bytes/s.blockSize:
		return nil
	case s.devices > 1:
		return errkind.New(errkind.FailedPrecondition, "btrfs on %s has %d devices, and a request does not say which one grows: run btrfs filesystem resize DEVICE:max in the guest", disk, s.devices)
	case blocks < btrfsLeastBytes/s.blockSize:
		return errkind.New(errkind.FailedPrecondition, "btrfs on %s: the kernel resizes no btrfs to less than %d bytes: request more", disk, btrfsLeastBytes)
	}
	return nil
}

func btrfsGrow(ctx context.Context, m Mounted, blocks uint64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s, err := btrfsMounted(m)
	if err == nil {
		err = s.canGrow(m.Disk.Name(), blocks)
	}
	if err != nil {
		return err
	}
	if now := s.bytes / s.blockSize; blocks > now {
		if err := btrfsAdd(m, s.device, (blocks-now)*s.blockSize); err != nil {
			return fmt.Errorf("grow btrfs on %s to %d blocks: %w", m.Disk.Name(), blocks, err)
		}
		m.stepped(blocks)
	}
	return btrfsSettle(ctx, m)
}

// btrfsAdd adds bytes to a device of the filesystem. It fails if the device does not have them.
func btrfsAdd(m Mounted, device, bytes uint64) error {
	var args [4096]byte // struct btrfs_ioctl_vol_args: a descriptor that is not used, and a text
	copy(args[8:], strconv.FormatUint(device, 10)+":+"+strconv.FormatUint(bytes, 10))
	result, _, errno := unix.Syscall(unix.SYS_IOCTL, m.Dir.Fd(), btrfsIocResize, uintptr(unsafe.Pointer(&args)))
	switch {
	case errno == unix.EFBIG: // another grower was first: the caller reads the real end
		return nil
	case errno != 0:
		return os.NewSyscallError("ioctl(BTRFS_IOC_RESIZE)", errno)
	case result == btrfsBusy:
		return fmt.Errorf("a balance, which may be a paused one, another resize or a change of devices is in progress: %w", unix.EBUSY)
	case result != 0:
		return fmt.Errorf("ioctl(BTRFS_IOC_RESIZE) returns %d", result)
	}
	return nil
}

// btrfsSettle returns when the superblock on the disk has the size that the kernel has in memory.
// It commits the transaction if necessary.
func btrfsSettle(_ context.Context, m Mounted) error {
	s, err := btrfsMounted(m)
	if err != nil {
		return err
	}
	if m.Proven != nil && m.Proven.kept >= s.bytes/s.blockSize {
		return nil
	}
	onDisk, err := readBtrfsSuper(m.Disk)
	if err == nil && onDisk.bytes < s.bytes {
		if err = btrfsCommit(m); err == nil {
			onDisk, err = readBtrfsSuper(m.Disk)
		}
	}
	if err == nil && onDisk.bytes < s.bytes {
		err = fmt.Errorf("btrfs on %s: its superblock on the disk has not the new size", m.Disk.Name())
	}
	if err == nil {
		err = m.Disk.Sync() // with nobarrier, the disk's cache may still have it
	}
	if err == nil && m.Proven != nil {
		m.Proven.kept = onDisk.bytes / onDisk.blockSize
	}
	return err
}

// btrfsCommit commits the running transaction, without the data that is not in it yet.
func btrfsCommit(m Mounted) error {
	var transaction uint64
	if err := ioctl(m, "BTRFS_IOC_START_SYNC", btrfsIocStartSync, unsafe.Pointer(&transaction)); err != nil {
		return err
	}
	return ioctl(m, "BTRFS_IOC_WAIT_SYNC", btrfsIocWaitSync, unsafe.Pointer(&transaction))
}

// btrfsStopped reports whether the kernel has made a read-only btrfs read-only because of an error.
// Then it starts no transaction any more, not even the empty one of a filesystem that somebody has
// made read-only (join_transaction in fs/btrfs/transaction.c).
func btrfsStopped(dir *os.File) bool {
	var transaction uint64
	return errors.Is(ioctl(Mounted{Dir: dir}, "BTRFS_IOC_START_SYNC", btrfsIocStartSync, unsafe.Pointer(&transaction)), unix.EROFS)
}

// btrfsLoad loads the modules of btrfs from the guest's image. They are not loaded at the boot,
// because one of them measures its own speed for seconds in an emulated guest (lib/raid6). The
// kernel cannot load them: the image has no modprobe. Without them, mount(2) reports the problem.
func btrfsLoad() {
	known, err := os.ReadFile("/proc/filesystems")
	if err == nil && bytes.Contains(known, []byte("\tbtrfs\n")) {
		return
	}
	_ = guestinit.LoadModules(modulelist.BtrfsPath)
}
