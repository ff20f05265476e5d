package vm

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// folderPattern is the pattern of the names of guests' folders below the folder for temporary
// files. folderLock is a file in each, which is locked (flock(2)) while its guest's process lives.
// A killed process cannot remove its folder, so the next guest does.
const (
	folderPattern = "directvol-guest-*"
	folderLock    = "lock"
)

// makeFolder makes a folder for a guest, and removes the folders of killed processes. The lock ends
// with the process, or when it is closed.
func makeFolder() (dir string, lock *os.File, err error) {
	removeLeft()
	dir, err = os.MkdirTemp("", folderPattern)
	if err != nil {
		return "", nil, err
	}
	// The file gets the name of the lock only when it is locked, because removeLeft looks for that
	// name.
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

// removeLeft removes folders of processes that have ended. It leaves folders of other users alone.
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
