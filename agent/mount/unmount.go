package mount

import (
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"
)

// A mount that is busy is tried so often, with a pause: whoever looks at its root, as we do
// for statistics, uses it until he has looked, and the kernel has no event for that.
const (
	busyTries = 5
	busyPause = 5 * time.Millisecond
)

// Unmount is umount(2) of the topmost mount at a path. Where somebody uses it for longer
// than a moment it is EBUSY.
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

// Idle returns EBUSY of a mount that somebody uses. The kernel tells that without unmounting:
// with MNT_EXPIRE umount(2) marks a mount that is not in use, and only unmounts it
// where it bears the mark already. Any use takes the mark away (mntput in
// fs/namespace.c), such as opening and closing its root.
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
	default: // nothing is mounted there any more, or something else is wrong: umount(2) will say it
		return nil
	}
}
