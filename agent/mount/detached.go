package mount

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

// Detached mounts a source at no place, by the mount API of Linux 5.2 (fsopen,
// fsconfig and fsmount in fs/fsopen.c and fs/namespace.c). Closing the file, which is the
// caller's, unmounts it, unless Place has given it one. It takes as long as the disk wants.
func Detached(source, fstype string, o Options) (*os.File, error) {
	config, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(config)
	err = unix.FsconfigSetString(config, "source", source)
	for flag, option := range superFlags {
		if err == nil && o.Flags&flag != 0 {
			err = unix.FsconfigSetFlag(config, option)
		}
	}
	for option := range strings.SplitSeq(o.Data, ",") {
		if err == nil && option != "" {
			err = setOption(config, option)
		}
	}
	if err == nil {
		err = unix.FsconfigCreate(config)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "fsconfig", Path: source, Err: err}
	}
	attributes := 0
	for flag, attribute := range mountFlags {
		if o.Flags&flag != 0 {
			attributes |= attribute
		}
	}
	mount, err := unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return nil, &fs.PathError{Op: "fsmount", Path: source, Err: err}
	}
	return os.NewFile(uintptr(mount), source), nil
}

func setOption(config int, option string) error {
	if key, value, ok := strings.Cut(option, "="); ok {
		return unix.FsconfigSetString(config, key, value)
	}
	return unix.FsconfigSetFlag(config, option)
}

// Place mounts what Detached, or open_tree(2), has returned at a directory.
func Place(mount *os.File, mountPoint string) error {
	err := unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, mountPoint, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return &fs.PathError{Op: "move_mount", Path: mountPoint, Err: err}
	}
	return nil
}
