// Package guestinit performs the duties of PID 1 in a guest: it mounts the kernel's filesystems,
// loads the image's modules, reaps orphaned processes, and powers the guest off.
package guestinit

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// kernelMounts are the mounts that programs expect, in order.
var kernelMounts = []struct {
	fstype, target string
	flags          uintptr
	data           string
}{
	{"proc", "/proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"sysfs", "/sys", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"devtmpfs", "/dev", unix.MS_NOSUID, "mode=0755"},
	{"tmpfs", "/run", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
	{"tmpfs", "/tmp", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	{"cgroup2", "/sys/fs/cgroup", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"devpts", "/dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,ptmxmode=0666"},
}

// Mount mounts the kernel's filesystems. It leaves existing mounts as they are.
func Mount() error {
	for _, m := range kernelMounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		err := unix.Mount(m.fstype, m.target, m.fstype, m.flags, m.data)
		if err != nil && !errors.Is(err, unix.EBUSY) {
			return &fs.PathError{Op: fmt.Sprintf("mount(%s)", m.fstype), Path: m.target, Err: err}
		}
	}
	return nil
}
