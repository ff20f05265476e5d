package filesystem

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// The ioctls that freeze and thaw (include/uapi/linux/fs.h).
const (
	ioctlFreeze = 0xc0045877 // FIFREEZE, _IOWR('X', 119, int)
	ioctlThaw   = 0xc0045878 // FITHAW, _IOWR('X', 120, int)
)

// Errors of Freeze and Thaw.
var (
	// ErrCannotFreeze means that this kind of filesystem has no freeze.
	ErrCannotFreeze = errors.New("this filesystem cannot be frozen")
	// ErrFrozen means that the filesystem is frozen already, or is being frozen or thawed by
	// another program.
	ErrFrozen = errors.New("it is frozen already")
	// ErrNotFrozen means that there is nothing to thaw.
	ErrNotFrozen = errors.New("it is not frozen")
)

// Freeze writes all that is cached of the filesystem of an open file to its disk, and stops every
// writer until Thaw (FIFREEZE). It blocks as long as the disk does, and cannot be interrupted. The
// filesystem stays frozen when the process ends. A frozen filesystem answers readers, statfs and
// opens; the kernel leaves out the access times.
func Freeze(root *os.File) error {
	err := unix.IoctlSetInt(int(root.Fd()), ioctlFreeze, 0)
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY):
		err = ErrCannotFreeze
	case errors.Is(err, unix.EBUSY):
		err = ErrFrozen
	}
	return freezeError("FIFREEZE", root, err)
}

// Thaw undoes Freeze, whoever has frozen the filesystem (FITHAW). ext4 writes its superblock first:
// Thaw blocks as long as the disk does. It waits for a Freeze in progress.
func Thaw(root *os.File) error {
	err := unix.IoctlSetInt(int(root.Fd()), ioctlThaw, 0)
	if errors.Is(err, unix.EINVAL) {
		err = ErrNotFrozen
	}
	return freezeError("FITHAW", root, err)
}

func freezeError(op string, file *os.File, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: file.Name(), Err: err}
}
