package mount

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// superFlags maps flags of mount(2) that concern a filesystem to its options. mountFlags maps those
// that concern a single mount to the attributes of mount_setattr(2).
var (
	superFlags = map[uintptr]string{unix.MS_RDONLY: "ro", unix.MS_SYNCHRONOUS: "sync", unix.MS_DIRSYNC: "dirsync"}
	mountFlags = map[uintptr]int{
		unix.MS_RDONLY: unix.MOUNT_ATTR_RDONLY, unix.MS_NOSUID: unix.MOUNT_ATTR_NOSUID, unix.MS_NODEV: unix.MOUNT_ATTR_NODEV,
		unix.MS_NOEXEC: unix.MOUNT_ATTR_NOEXEC, unix.MS_NOATIME: unix.MOUNT_ATTR_NOATIME, unix.MS_NODIRATIME: unix.MOUNT_ATTR_NODIRATIME,
		unix.MS_STRICTATIME: unix.MOUNT_ATTR_STRICTATIME,
	}
)

// Detached mounts a source without attaching it to the tree, by the mount API of Linux 5.2 (fsopen,
// fsconfig and fsmount in fs/fsopen.c and fs/namespace.c). The caller closes the file, which
// unmounts the source unless Place has attached it. Detached blocks as long as the disk does.
// Reason explains its error.
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
		return nil, &fs.PathError{Op: "fsconfig", Path: source, Err: withReason(config, err)}
	}
	attributes := 0
	for flag, attribute := range mountFlags {
		if o.Flags&flag != 0 {
			attributes |= attribute
		}
	}
	mount, err := unix.Fsmount(config, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return nil, &fs.PathError{Op: "fsmount", Path: source, Err: withReason(config, err)}
	}
	return os.NewFile(uintptr(mount), source), nil
}

// reasonBytes is more than the length of a filesystem's message.
const reasonBytes = 1024

// reasonError is an error with the kernel's messages about it.
type reasonError struct {
	error
	reason string
}

func (e *reasonError) Unwrap() error { return e.error }

// Reason returns the kernel's messages about an error of Detached, in one line, or "".
func Reason(err error) string {
	if with, ok := errors.AsType[*reasonError](err); ok {
		return with.reason
	}
	return ""
}

// withReason adds the messages of a filesystem since fsopen(2) to err. Each read returns one
// message, prefixed with "e ", "w " or "i ", and ENODATA at the end (fscontext_read in
// fs/fsopen.c).
func withReason(config int, err error) error {
	var said []string
	buf := make([]byte, reasonBytes)
	for range maxReasons {
		n, readErr := unix.Read(config, buf)
		if readErr != nil || n <= 0 {
			break
		}
		_, text, _ := strings.Cut(strings.ToValidUTF8(string(buf[:n]), "?"), " ")
		said = append(said, strings.TrimSpace(text))
	}
	return &reasonError{err, strings.Join(said, "; ")}
}

// maxReasons is the number of messages that the kernel keeps (struct fc_log in
// include/linux/fs_context.h).
const maxReasons = 8

func setOption(config int, option string) error {
	if key, value, ok := strings.Cut(option, "="); ok {
		return unix.FsconfigSetString(config, key, value)
	}
	return unix.FsconfigSetFlag(config, option)
}

// Place attaches a mount that Detached or open_tree(2) has returned at a directory.
func Place(mount *os.File, mountPoint string) error {
	err := unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, mountPoint, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return &fs.PathError{Op: "move_mount", Path: mountPoint, Err: err}
	}
	return nil
}
