package storage

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/refusal"
)

// replay has the kernel replay a disk's log where the filesystem has to be
// mounted afresh after that. It mounts the disk where nobody sees it, and
// unmounts it. Where the log is empty, which the superblock says, there is
// nothing to do.
func replay(r request, from origin) error {
	fstype, ok := filesystem.Lookup(r.fstype)
	if !ok || fstype.NeedsReplay == nil || leavesLog(r.data) {
		return nil
	}
	disk, err := claim(from.path)
	if err != nil {
		return nil // mounted elsewhere in this guest; or mount(2) says what is wrong
	}
	needs, err := fstype.NeedsReplay(disk)
	disk.Close()
	if err != nil || !needs {
		return nil // of what is no such filesystem mount(2) says more
	}
	if err := mountUnseen(r, from); err != nil {
		return fmt.Errorf("replay its journal: %w", err)
	}
	// Looked at: a filesystem that is mounted still would be mounted as it is.
	if disk, err = claim(from.path); err != nil {
		return refusal.New(refusal.FailedPrecondition, "%s is in use in the guest behind the replay of its journal: %w", from.path, err)
	}
	return disk.Close()
}

// leavesLog tells whether mount options keep the kernel from replaying.
func leavesLog(data string) bool {
	options := strings.Split(data, ",")
	return slices.Contains(options, "noload") || slices.Contains(options, "norecovery")
}

// claim opens a block device that nobody has mounted. It is given up by Close.
func claim(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0) }

// mountUnseen mounts a disk at no place, by the mount API of Linux 5.2, and
// unmounts it by closing its descriptor: nobody can be in it.
func mountUnseen(r request, from origin) error {
	context, err := unix.Fsopen(r.fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(context)
	err = unix.FsconfigSetString(context, "source", from.path)
	if err == nil && r.flags&unix.MS_RDONLY != 0 {
		err = unix.FsconfigSetFlag(context, "ro")
	}
	if err == nil {
		err = unix.FsconfigCreate(context)
	}
	if err != nil {
		return &fs.PathError{Op: "fsconfig", Path: from.path, Err: err}
	}
	mount, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "fsmount", Path: from.path, Err: err}
	}
	return unix.Close(mount)
}
