package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/refusal"
)

// mountOrigin mounts an origin. The same one that is mounted there already, as it would be
// mounted, is taken over; another one is refused: it would be hidden, or hide.
func mountOrigin(ctx context.Context, d *devices, r request, from origin) (did, error) {
	switch top, err := mount.Topmost(r.mountPoint); {
	case err != nil:
		return did{}, err
	case top == nil:
	case r.isOf(from, top):
		return did{found: true}, r.mustAgree(top, from)
	default:
		return did{}, occupied(r, from, nameOf(top))
	}
	made, err := makeMountPoint(r.mountPoint)
	if err != nil {
		return did{}, err
	}
	said := health.OpenKernelLog()
	defer said.Close()
	err = d.mount(ctx, r, from)
	if err == nil {
		return did{made: made}, nil
	}
	if made {
		os.Remove(r.mountPoint)
	}
	if refusal.KindOf(err) != refusal.Internal {
		return did{}, err
	}
	return did{}, refusal.New(mountKind(err), "mount %s of %s at %s with %q: %w: %s", r.fstype, from.path, r.mountPoint, r.data, err, wayOut(r, from, err, said))
}

// wayOut is what is known of a disk that could not be mounted: by its filesystem's rules, by what it holds, or by what the
// kernel has said of it.
func wayOut(r request, from origin, err error, log *health.KernelLog) string {
	kernel := "the guest's kernel says nothing of it"
	if said := log.Said(filepath.Base(from.path)); said != "" {
		kernel = "the guest's kernel says: " + said
	}
	fstype, ok := filesystem.Lookup(r.fstype)
	if !ok {
		return kernel
	}
	disk, openErr := os.Open(from.path)
	if openErr != nil {
		return kernel
	}
	defer disk.Close()
	holds := ""
	if errors.Is(err, unix.EINVAL) {
		switch found := filesystem.Identify(disk); found {
		case r.fstype:
			if r.data != "" {
				holds = fmt.Sprintf("is each of its options one that %s has? %s", r.fstype, kernel)
			}
		case "":
			holds = fmt.Sprintf("the disk holds none of %v: is it formatted, and not partitioned? %s", filesystem.Names(), kernel)
		default:
			holds = "the disk holds " + found
		}
	}
	return cmp.Or(fstype.MountRefused(disk, err), holds, kernel)
}

// occupied refuses a mount point at which something else is mounted.
func occupied(r request, from origin, by string) error {
	return refusal.New(refusal.AlreadyExists, "storage %s: %s is mounted there already, not %s", r.mountPoint, by, from.named(r.fstype))
}

// named is an origin as a person tells it from another disk with the same name.
func (o origin) named(fstype string) string {
	if o.device.Seq == 0 {
		return fmt.Sprintf("%s (%s)", o.path, fstype)
	}
	return fmt.Sprintf("%s (%s, diskseq %d)", o.path, fstype, o.device.Seq)
}

// nameOf is a mount as occupied names it.
func nameOf(top *mount.Info) string {
	by := origin{path: top.Source}
	if devices := mount.Filesystem(top).Devices; len(devices) > 0 {
		by.device = devices[0]
	}
	if top.Root == "/" {
		return by.named(top.FSType)
	}
	return fmt.Sprintf("folder %s of %s", top.Root, by.named(top.FSType))
}

// mountKind is what an error of mount(2) means to who asked for the mount.
func mountKind(err error) refusal.Kind {
	for _, errno := range []unix.Errno{unix.EACCES, unix.EROFS, unix.EBUSY, unix.ENODEV, unix.EUCLEAN, unix.EBADMSG, unix.EIO, unix.ENXIO} {
		if errors.Is(err, errno) {
			return refusal.FailedPrecondition // the disk's or the kernel's state
		}
	}
	if errors.Is(err, unix.EINVAL) {
		return refusal.InvalidArgument // another filesystem, or an option that it does not have
	}
	return refusal.Internal
}

// makeMountPoint makes the directory where it is not there. A path that leads
// through a symbolic link is refused: mountinfo would name the volume by another
// one, by which nobody here would find it again.
func makeMountPoint(path string) (made bool, err error) {
	refuse := func(format string, args ...any) (bool, error) {
		if made {
			os.Remove(path)
		}
		return false, refusal.New(refusal.InvalidArgument, "mount point: "+format, args...)
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return refuse("%w", err)
		}
		made = true
	} else if err != nil {
		return refuse("%w", err)
	} else if !info.IsDir() {
		return refuse("%s is no directory", path)
	}
	switch real, err := filepath.EvalSymlinks(path); {
	case err != nil:
		return refuse("%w", err)
	case real != path:
		return refuse("%s leads through a symbolic link to %s: name that", path, real)
	}
	return made, nil
}

// stands tells whether a storage is mounted where it is to be, and open to its
// users: what lies over it is refused, as it would be taken for it.
func (m *mounted) stands() (bool, error) {
	mounts, err := mount.At(m.mountPoint)
	at := slices.IndexFunc(mounts, m.is)
	if at < 0 {
		return false, err
	}
	if top := mounts[len(mounts)-1]; top != mounts[at] {
		return true, refusal.New(refusal.FailedPrecondition, "storage %s: %s (%s) is mounted over it: unmount that first", m.mountPoint, top.Source, top.FSType)
	}
	over, err := mount.Hiding(mounts[at])
	if over != nil {
		err = refusal.New(refusal.FailedPrecondition, "storage %s: %s (%s) is mounted at %s over a folder above, and hides it: unmount that first", m.mountPoint, over.Source, over.FSType, over.Mountpoint)
	}
	return true, err
}

// unmount is never lazy: a volume that is still in use would be pulled from
// under its users. What someone else has unmounted is gone, whatever lies there
// now.
func unmount(m *mounted) error {
	there, err := m.stands()
	if err == nil && there {
		err = unmountThere(m)
	}
	return err
}

func unmountThere(m *mounted) error {
	switch err := unmountAt(m.mountPoint, 0); {
	case errors.Is(err, unix.EBUSY):
		return inUse(m.mountPoint, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, fs.ErrNotExist):
		// Someone else has just unmounted it, or its path leads elsewhere.
		if there, hidden := m.stands(); there || hidden != nil {
			return cmp.Or(hidden, error(&fs.PathError{Op: "unmount", Path: m.mountPoint, Err: err}))
		}
	case err != nil:
		return &fs.PathError{Op: "unmount", Path: m.mountPoint, Err: err}
	}
	return nil
}

// A mount that is busy is tried so often, with a pause: whoever looks at its root, as we do
// for statistics, uses it until he has looked, and the kernel has no event for that.
const (
	busyTries = 5
	busyPause = 5 * time.Millisecond
)

// unmountAt is umount(2) of what is mounted at a path, and in use for longer than a moment
// by nobody.
func unmountAt(path string, flags int) error {
	return unlessBusy(func() error { return unix.Unmount(path, flags|unix.UMOUNT_NOFOLLOW) })
}

func unlessBusy(try func() error) (err error) {
	pause := time.NewTicker(busyPause)
	defer pause.Stop()
	for range busyTries - 1 {
		if err = try(); !errors.Is(err, unix.EBUSY) {
			return err
		}
		<-pause.C
	}
	return try()
}
