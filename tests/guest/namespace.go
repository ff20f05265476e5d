package main

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// keepMounts keeps the present mounts in a separate mount namespace, which no unmount reaches,
// until this process is killed.
func keepMounts(ready string) error {
	runtime.LockOSThread() // the namespace belongs to the thread
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return &os.PathError{Op: "make private", Path: "/", Err: err}
	}
	if err := os.WriteFile(ready, nil, 0o600); err != nil {
		return err
	}
	return os.NewSyscallError("pause", unix.Pause())
}
