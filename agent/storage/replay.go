package storage

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/refusal"
)

// mountReplayed mounts an origin, and once more where the first mount has
// replayed a log with a growth in it: the kernel has counted the groups before,
// and the next growth would go by that. Whether it has, the size tells that the
// superblock had before and the filesystem has now.
func mountReplayed(r request, from origin) error {
	before, known := endOnDisk(r.fstype, from.path)
	mount := func() error { return unix.Mount(from.path, r.mountPoint, r.fstype, r.flags, r.data) }
	err := mount()
	if errors.Is(err, unix.EUCLEAN) && known {
		// An xfs recovery that failed on groups beyond the filesystem's end has
		// written the superblock that has them, if that was before them in the
		// log: the next one goes by it.
		if now, _ := endOnDisk(r.fstype, from.path); now > before {
			before, err = now, mount()
		}
	}
	if err != nil || !known {
		return err
	}
	if after, known := endMounted(r, from); !known || after == before {
		return nil
	}
	if err := unmountWhole(r, from); err != nil {
		return refusal.New(refusal.FailedPrecondition, "a growth was in its log, so it has to be mounted twice, and somebody in the guest is in it already: unmount it there and try again: %w", err)
	}
	return mount()
}

// unmountWhole unmounts what has just been mounted, and proves that the kernel
// has let go of the disk: mounted elsewhere, it would be counted with as it is.
func unmountWhole(r request, from origin) error {
	if err := unix.Unmount(r.mountPoint, unix.UMOUNT_NOFOLLOW); err != nil {
		// Not left there: the call is refused, and nobody would hold it.
		unix.Unmount(r.mountPoint, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		return err
	}
	disk, err := os.OpenFile(from.path, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return err
	}
	return disk.Close()
}

// endOnDisk is where the superblock on a disk has the filesystem end.
func endOnDisk(fstype, path string) (blocks uint64, known bool) {
	t, ok := filesystem.Lookup(fstype)
	if !ok {
		return 0, false
	}
	disk, err := os.Open(path)
	if err != nil {
		return 0, false
	}
	defer disk.Close()
	blocks, err = t.EndOnDisk(disk)
	return blocks, err == nil // what is no such filesystem mount(2) refuses
}

// endMounted is where the filesystem ends that has just been mounted.
func endMounted(r request, from origin) (blocks uint64, known bool) {
	t, _ := filesystem.Lookup(r.fstype)
	dir, err := os.OpenFile(r.mountPoint, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0, false
	}
	defer dir.Close()
	disk, err := os.Open(from.path)
	if err != nil {
		return 0, false
	}
	defer disk.Close()
	geometry, err := t.Geometry(filesystem.Mounted{Dir: dir, Disk: disk})
	return geometry.Blocks, err == nil
}
