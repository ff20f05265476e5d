package vm

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// folderPattern names the folders of guests below the folder for temporary files,
// and folderLock a file in each, which is locked (flock(2)) while its guest's process
// lives. A process that is killed cannot remove its folder: the next guest does.
const (
	folderPattern = "directvol-guest-*"
	folderLock    = "lock"
)

// makeFolder makes a folder for a guest, and removes those that killed processes have
// left. The lock ends with the process, or when it is closed.
func makeFolder() (dir string, lock *os.File, err error) {
	removeLeft()
	dir, err = os.MkdirTemp("", folderPattern)
	if err != nil {
		return "", nil, err
	}
	// removeLeft looks for the lock, which appears when it is locked.
	passing := filepath.Join(dir, folderLock+".new")
	lock, err = os.Create(passing)
	if err == nil {
		err = os.NewSyscallError("flock", unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	}
	if err == nil {
		err = os.Rename(passing, filepath.Join(dir, folderLock))
	}
	if err != nil {
		os.RemoveAll(dir)
	}
	return dir, lock, err
}

// removeLeft removes folders of processes that are gone. What is another user's stays.
func removeLeft() {
	locks, _ := filepath.Glob(filepath.Join(os.TempDir(), folderPattern, folderLock))
	for _, path := range locks {
		lock, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
		if err != nil {
			continue
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			os.RemoveAll(filepath.Dir(path))
		}
		lock.Close()
	}
}
