package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/turns"
)

// devices are the block devices below storages. One device is mounted by one call at a time.
type devices struct{ turns turns.Turns }

// mount mounts an origin. If the origin is a disk, mount accepts only the disk that was found, not
// another one that has got the same name since. It waits for a turn until ctx ends, and for the
// disk without a limit.
func (d *devices) mount(ctx context.Context, r request, from origin) error {
	fstype, ok := filesystem.Lookup(r.fstype)
	if !ok {
		return mountInTree(r, from)
	}
	done, err := d.turns.Take(ctx, from.path)
	if err != nil {
		return errkind.New(errkind.DeadlineExceeded, "mount %s: another call uses its device %s, which may not answer: %w", r.mountPoint, from.path, err)
	}
	defer done()
	disk, err := keepDisk(from)
	if err != nil {
		return err
	}
	defer disk.Close()
	if err := mountDisk(fstype, r, from); err != nil {
		return err
	}
	return takeBackOther(r, from)
}

func mountInTree(r request, from origin) error {
	return unix.Mount(from.path, r.mountPoint, r.fstype, r.options.Flags, r.options.Data)
}

// keepDisk opens the disk that was found, if its node still leads to it. While the disk is open, no
// other disk gets its number (bdev_alloc and disk_release in block/).
func keepDisk(from origin) (*os.File, error) {
	disk, err := os.Open(from.path)
	if err != nil {
		return nil, errkind.New(errkind.FailedPrecondition, "the disk that was found at %s is gone: call again: %w", from.path, err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(disk.Fd()), &st); err != nil {
		err = &fs.PathError{Op: "fstat", Path: from.path, Err: err}
	} else if is := (mount.Device{Number: st.Rdev, Seq: blockdev.SeqOf("/", st.Rdev)}); !from.device.Same(is) {
		err = errkind.New(errkind.FailedPrecondition, "the disk that was found at %s has left, and another one (diskseq %d, not %d) has taken its place: call again", from.path, is.Seq, from.device.Seq)
	}
	if err != nil {
		disk.Close()
		return nil, err
	}
	return disk, nil
}

// takeBackOther unmounts a mount that was just made by an origin's name but is not of that origin.
// No later call would know the owner of such a mount.
func takeBackOther(r request, from origin) error {
	mounts, err := mountsAt(r.mountPoint)
	if err == nil && slices.ContainsFunc(mounts, func(at *mount.Info) bool { return r.isOf(from, at) }) {
		return nil
	}
	if len(mounts) > 0 && mounts[len(mounts)-1].Source != from.path {
		return errkind.New(errkind.FailedPrecondition, "storage %s: %s is mounted there instead of %s: call again", r.mountPoint, nameOf(mounts[len(mounts)-1]), from.named(r.fstype))
	}
	if undo := mount.Unmount(r.mountPoint); undo != nil && !errors.Is(undo, unix.EINVAL) {
		err = errors.Join(err, &fs.PathError{Op: "unmount", Path: r.mountPoint, Err: undo})
	}
	return errors.Join(errkind.New(errkind.FailedPrecondition, "storage %s: the mounted disk is not %s: call again", r.mountPoint, from.named(r.fstype)), err)
}

// mountDisk mounts a disk. It mounts the disk twice if the first mount has replayed a log that
// contains a growth: the kernel counts the groups before the replay, and the next growth would use
// that wrong count. A growth was replayed if the mounted size differs from the size in the
// superblock before. Until that is known, the mount is not attached to the tree: no call finds it,
// nobody can use it, and it ends with this process.
func mountDisk(fstype filesystem.Type, r request, from origin) error {
	fstype.BeforeMount()
	r.options = r.options.With(neededOptions(fstype, r, from))
	before, known := endOnDisk(fstype, from)
	if !known || strings.Contains(r.options.Data, `"`) { // only mount(2) knows how to interpret a quote
		return mountInTree(r, from)
	}
	first, err := mount.Detached(from.path, r.fstype, r.options)
	if errors.Is(err, unix.EUCLEAN) {
		// An xfs recovery that fails on groups beyond the filesystem's end has already written the
		// superblock with these groups, if the superblock came before them in the log. The next
		// recovery then succeeds.
		if now, _ := endOnDisk(fstype, from); now > before {
			before = now
			first, err = mount.Detached(from.path, r.fstype, r.options)
		}
	}
	if err != nil {
		return err
	}
	defer first.Close()
	after, err := endMounted(fstype, first, from)
	if err != nil { // without proof the mount is not attached
		return fmt.Errorf("find where it ends: %w", err)
	}
	if after == before {
		return mount.Place(first, r.mountPoint)
	}
	first.Close() // this unmounts it
	disk, err := claim(from.path)
	if err != nil { // check: if it is mounted elsewhere, the wrong group count would stay
		return errkind.New(errkind.FailedPrecondition, "the growth of %s was cut off, so it has to be mounted twice, but somebody in the guest has mounted it meanwhile: unmount it there and try again: %w", from.path, err)
	}
	disk.Close()
	return mountInTree(r, from)
}

// neededOptions returns an option that the disk needs and the request does not set.
func neededOptions(fstype filesystem.Type, r request, from origin) string {
	disk, err := os.Open(from.path)
	if err != nil {
		return "" // mount(2) reports the problem
	}
	defer disk.Close()
	options := fstype.Options(disk)
	key, _, _ := strings.Cut(options, "=")
	if options == "" || r.options.Has(key+"=") {
		return ""
	}
	return options
}

// claim opens a block device exclusively, which fails if it is mounted anywhere.
func claim(path string) (*os.File, error) { return os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0) }

// endOnDisk returns the filesystem's end according to the superblock on the disk. known is false if
// the disk is mounted already, because nothing is replayed then.
func endOnDisk(fstype filesystem.Type, from origin) (blocks uint64, known bool) {
	disk, err := claim(from.path)
	if err != nil {
		return 0, false // mount(2) reports the problem
	}
	defer disk.Close()
	blocks, err = fstype.EndOnDisk(disk)
	return blocks, err == nil // mount(2) refuses a disk without this filesystem
}

// endMounted returns where the filesystem that was just mounted ends.
func endMounted(fstype filesystem.Type, mounted *os.File, from origin) (blocks uint64, err error) {
	fd, err := unix.Openat(int(mounted.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &fs.PathError{Op: "open its root", Path: from.path, Err: err}
	}
	dir := os.NewFile(uintptr(fd), from.path)
	defer dir.Close()
	disk, err := os.Open(from.path)
	if err != nil {
		return 0, err
	}
	defer disk.Close()
	geometry, err := fstype.Geometry(filesystem.Mounted{Dir: dir, Disk: disk})
	return geometry.Blocks, err
}
