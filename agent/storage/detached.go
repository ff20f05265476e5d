package storage

import (
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// superFlags are mount(2)'s flags that concern a filesystem, by their options, and
// mountFlags those that concern one mount of it, by mount_setattr(2)'s.
var (
	superFlags = map[uintptr]string{unix.MS_RDONLY: "ro", unix.MS_SYNCHRONOUS: "sync", unix.MS_DIRSYNC: "dirsync"}
	mountFlags = map[uintptr]int{
		unix.MS_RDONLY: unix.MOUNT_ATTR_RDONLY, unix.MS_NOSUID: unix.MOUNT_ATTR_NOSUID, unix.MS_NODEV: unix.MOUNT_ATTR_NODEV,
		unix.MS_NOEXEC: unix.MOUNT_ATTR_NOEXEC, unix.MS_NOATIME: unix.MOUNT_ATTR_NOATIME, unix.MS_NODIRATIME: unix.MOUNT_ATTR_NODIRATIME,
		unix.MS_STRICTATIME: unix.MOUNT_ATTR_STRICTATIME,
	}
)

// mountDetached mounts an origin at no place, by the mount API of Linux 5.2 (fsopen,
// fsconfig and fsmount in fs/fsopen.c and fs/namespace.c). Closing the file unmounts
// it, unless it has got a place.
func mountDetached(r request, from origin) (*os.File, error) {
	config, err := unix.Fsopen(r.fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(config)
	err = unix.FsconfigSetString(config, "source", from.path)
	for flag, option := range superFlags {
		if err == nil && r.flags&flag != 0 {
			err = unix.FsconfigSetFlag(config, option)
		}
	}
	for option := range strings.SplitSeq(r.data, ",") {
		if err == nil && option != "" {
			err = setOption(config, option)
		}
	}
	if err == nil {
		err = unix.FsconfigCreate(config)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "fsconfig", Path: from.path, Err: err}
	}
	attributes := 0
	for flag, attribute := range mountFlags {
		if r.flags&flag != 0 {
			attributes |= attribute
		}
	}
	mount, err := unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return nil, &fs.PathError{Op: "fsmount", Path: from.path, Err: err}
	}
	return os.NewFile(uintptr(mount), from.path), nil
}

func setOption(config int, option string) error {
	if key, value, ok := strings.Cut(option, "="); ok {
		return unix.FsconfigSetString(config, key, value)
	}
	return unix.FsconfigSetFlag(config, option)
}

// place puts a mount where it is to be.
func place(mount *os.File, mountPoint string) error {
	err := unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, mountPoint, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return &fs.PathError{Op: "move_mount", Path: mountPoint, Err: err}
	}
	return nil
}
