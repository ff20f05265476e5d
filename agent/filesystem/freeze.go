package filesystem

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/refusal"
)

// FIFREEZE and FITHAW of include/uapi/linux/fs.h, _IOWR('X', 119 and 120, int).
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// freeze writes out everything, the log and the superblock included, and lets
// nothing change the filesystem until thaw. It waits for the write calls that
// are under way and lets no new one begin.
func freeze(m Mounted) error {
	err := ioctl(m, "FIFREEZE", fiFreeze, nil)
	if errors.Is(err, unix.EBUSY) {
		return refusal.New(refusal.DeadlineExceeded, "%s is frozen by somebody else: thaw it (fsfreeze --unfreeze) and try again", m.Dir.Name())
	}
	return err
}

func thaw(m Mounted) error {
	if err := ioctl(m, "FITHAW", fiThaw, nil); err != nil && !errors.Is(err, unix.EINVAL) {
		return err // EINVAL: somebody else has thawed it
	}
	return nil
}

// Thaw ends a freeze of the filesystem at an open directory that an agent did
// not live to end. One that is not frozen is success.
func Thaw(dir *os.File) error { return thaw(Mounted{Dir: dir}) }

// writeOut has everything on the disk when it returns. While it freezes, writers
// wait: what look returns of the frozen filesystem is its answer.
func writeOut(m Mounted, look func() (bool, error)) (ok bool, err error) {
	if err := freeze(m); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, thaw(m)) }()
	return look()
}
