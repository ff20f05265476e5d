package main

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/guestinit"
	"github.com/directvol/directvol/protocols/modulelist"
)

// diskInit is the path of a distribution's init.
const diskInit = "/sbin/init"

// switchRoot switches to the system on the first disk. That system has the kernel modules that this
// image has loaded. switchRoot returns only on failure. An initramfs cannot be pivot_rooted, so the
// new root is mounted over the initramfs's root
// (Documentation/filesystems/ramfs-rootfs-initramfs.rst).
func switchRoot() error {
	const root = "/newroot"
	if err := errors.Join(guestinit.Mount(), guestinit.LoadModules(modulelist.Path)); err != nil {
		return err
	}
	if err := os.Mkdir(root, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("/dev/vda", root, "ext4", 0, ""); err != nil {
		return &os.PathError{Op: "mount(ext4 on /dev/vda)", Path: root, Err: err}
	}
	for _, kernels := range []string{"/dev", "/proc", "/sys", "/run"} {
		if err := unix.Mount(kernels, root+kernels, "", unix.MS_MOVE, ""); err != nil {
			return &os.PathError{Op: "move", Path: kernels, Err: err}
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return &os.PathError{Op: "move", Path: root, Err: err}
	}
	if err := errors.Join(unix.Chroot("."), os.Chdir("/")); err != nil {
		return err
	}
	return &os.PathError{Op: "exec", Path: diskInit, Err: unix.Exec(diskInit, []string{diskInit}, []string{"TERM=dumb"})}
}
