package mount

import (
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"
)

// busyTries is how often a busy mount is tried, with busyPause in between. A lookup of a mount's
// root, as for statistics, uses the mount for a moment, and the kernel has no event for its end.
const (
	busyTries = 5
	busyPause = 5 * time.Millisecond
)

// Unmount is umount(2) of the topmost mount at a path. It returns EBUSY if the mount is in use for
// longer than a moment.
func Unmount(path string) error { return unmount(path, 0) }

func unmount(path string, flags int) error {
	return unlessBusy(func() error { return unix.Unmount(path, flags|unix.UMOUNT_NOFOLLOW) })
}

func unlessBusy(try func() error) (err error) {
	pause := time.NewTicker(busyPause)
	defer pause.Stop()
	for range busyTries - 1 {
		if err = try(); !errors.Is(err, unix.EBUSY) {
			return err
		}
		<-pause.C
	}
	return try()
}

// Idle returns EBUSY if a mount is in use. It asks the kernel without unmounting: umount(2) with
// MNT_EXPIRE marks a mount that is not in use, and unmounts only a mount that is marked already.
// Any use clears the mark (mntput in fs/namespace.c), for instance opening and closing the mount's
// root.
func Idle(mountPoint string) error {
	use := func() error {
		fd, err := unix.Open(mountPoint, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return &fs.PathError{Op: "open", Path: mountPoint, Err: err}
		}
		return unix.Close(fd)
	}
	if err := use(); err != nil {
		return err
	}
	err := unmount(mountPoint, unix.MNT_EXPIRE)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return use()
	case errors.Is(err, unix.EBUSY):
		return err
	default: // nothing is mounted there any more, or umount(2) will report the problem
		return nil
	}
}
