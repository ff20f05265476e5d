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

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// mountOrigin mounts an origin. If the same origin is mounted there already with the same options,
// mountOrigin takes the mount over. Any other mount there is refused, because one would hide the
// other.
func mountOrigin(ctx context.Context, d *devices, r request, from origin) (did, error) {
	switch top, err := r.occupant(); {
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
	if errkind.Of(err) != errkind.Internal {
		return did{}, err
	}
	kind, why := wayOut(r, from, err, said)
	return did{}, errkind.New(kind, "mount %s of %s at %s with %q: %w: %s", r.fstype, from.path, r.mountPoint, r.options.Data, err, why)
}

// occupant returns the topmost mount at the mount point, with its present options, or nil.
func (r request) occupant() (*mount.Info, error) {
	at, err := mountsAt(r.mountPoint)
	if err != nil {
		return nil, err
	}
	if len(at) == 0 { // unless a folder above was renamed
		if _, err := mount.Look(r.mountPoint); errors.Is(err, mount.ErrNoMount) || errors.Is(err, mount.ErrNotExist) {
			return nil, nil
		}
	}
	return mount.Topmost(r.mountPoint)
}

// wayOut explains why a disk could not be mounted, and returns whether the request is at fault. It
// uses the filesystem's own rules, the disk's contents and the kernel's messages about the disk.
func wayOut(r request, from origin, err error, log *health.KernelLog) (errkind.Kind, string) {
	kind, kernel := mountKind(err), log.Words(filepath.Base(from.path), r.fstype)
	if reason := mount.Reason(err); reason != "" {
		kernel = "the guest's kernel says: " + reason
	}
	fstype, ok := filesystem.Lookup(r.fstype)
	if !ok {
		return kind, kernel
	}
	disk, openErr := os.Open(from.path)
	if errors.Is(openErr, fs.ErrNotExist) || errors.Is(openErr, unix.ENXIO) {
		return errkind.FailedPrecondition, "the disk is gone: attach it again"
	}
	if openErr != nil {
		return kind, kernel
	}
	defer disk.Close()
	if short := tooShort(fstype, disk); short != "" {
		return errkind.FailedPrecondition, short + ": restore the disk's size and content"
	}
	if said := fstype.MountRefused(disk, err); said != "" {
		return errkind.FailedPrecondition, said
	}
	if !errors.Is(err, unix.EINVAL) {
		return kind, kernel
	}
	found := filesystem.Identify(disk)
	if _, err := fstype.EndOnDisk(disk); err == nil {
		found = r.fstype // an ext3 mounts as ext4, too
	}
	switch {
	case found == r.fstype && mount.Reason(err) != "":
		return kind, kernel
	case found == r.fstype && r.options.Data != "":
		return kind, fmt.Sprintf("check that %s has each of its options. %s", r.fstype, kernel)
	case found == r.fstype:
		return errkind.FailedPrecondition, kernel
	case found != "":
		return kind, "the disk holds " + found
	}
	if found = filesystem.Found(disk); found == "" {
		found = "nothing known"
	}
	return kind, fmt.Sprintf("the disk holds %s: check that it is formatted with %s and not partitioned. %s", found, r.fstype, kernel)
}

// tooShort returns a message if the disk is smaller than its filesystem, or than any filesystem.
func tooShort(fstype filesystem.Type, disk *os.File) string {
	size, err := blockdev.SizeOf(disk)
	if err != nil {
		return ""
	}
	if size < filesystem.LeastBytes {
		return fmt.Sprintf("the disk has only %d bytes", size)
	}
	if extent, err := fstype.OnDisk(disk); err == nil && !extent.EndsWithin(size) {
		return fmt.Sprintf("the %s ends at %d bytes, but its disk has only %d", fstype.Name, extent.Bytes(), size)
	}
	return ""
}

// occupied refuses a mount point at which something else is mounted.
func occupied(r request, from origin, by string) error {
	return errkind.New(errkind.AlreadyExists, "storage %s: %s is mounted there already, not %s", r.mountPoint, by, from.named(r.fstype))
}

// named describes an origin so that a person can tell it from another disk with the same name.
func (o origin) named(fstype string) string {
	if o.device.Seq == 0 {
		return fmt.Sprintf("%s (%s)", o.path, fstype)
	}
	return fmt.Sprintf("%s (%s, diskseq %d)", o.path, fstype, o.device.Seq)
}

// nameOf describes a mount for occupied.
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

// mountKind returns the kind of an error of mount(2).
func mountKind(err error) errkind.Kind {
	for _, errno := range []unix.Errno{unix.EACCES, unix.EROFS, unix.EBUSY, unix.ENODEV, unix.EUCLEAN, unix.EBADMSG, unix.EIO, unix.ENXIO,
		unix.ENOENT, unix.ENOSYS, unix.EOPNOTSUPP, unix.ESRCH, unix.EFBIG} {
		if errors.Is(err, errno) {
			return errkind.FailedPrecondition // the disk's or the kernel's state
		}
	}
	if errors.Is(err, unix.EINVAL) {
		return errkind.InvalidArgument // another filesystem, or an unknown option
	}
	return errkind.Internal
}

// makeMountPoint is mount.MakePoint with InvalidArgument as the kind of its errors.
func makeMountPoint(path string) (made bool, err error) {
	made, err = mount.MakePoint(path)
	if err != nil {
		err = errkind.New(errkind.InvalidArgument, "%w", err)
	}
	return made, err
}

// isMounted reports whether a storage is mounted at its mount point. It returns an error if another
// mount covers the storage, because users would find that mount instead.
func (m *mounted) isMounted() (bool, error) { return m.isMountedBy(mount.Now) }

// isMountedBy is isMounted by one of the ways to read the mounts.
func (m *mounted) isMountedBy(read func() (*mount.List, error)) (bool, error) {
	mounts, err := read()
	if err != nil {
		return false, err
	}
	stack := mounts.Stack(m.mountPoint)
	at := slices.IndexFunc(stack, m.is)
	if at < 0 {
		return false, nil
	}
	if top := stack[len(stack)-1]; top != stack[at] {
		return true, errkind.New(errkind.FailedPrecondition, "storage %s: %s (%s) is mounted over it: unmount that first", m.mountPoint, top.Source, top.FSType)
	}
	if over := mounts.Hiding(stack[at]); over != nil {
		return true, errkind.New(errkind.FailedPrecondition, "storage %s: %s (%s) is mounted at %s over a folder above, and hides it: unmount that first", m.mountPoint, over.Source, over.FSType, over.Mountpoint)
	}
	return true, nil
}

// mountsAt returns the mounts at a path, from bottom to top, by mount.Now.
func mountsAt(path string) ([]*mount.Info, error) {
	mounts, err := mount.Now()
	if err != nil {
		return nil, err
	}
	return mounts.Stack(path), nil
}

// unmount is never lazy: a lazy unmount would remove a volume that is still in use from under its
// users. A storage that somebody else has unmounted counts as unmounted, whatever is mounted there
// now.
func unmount(m *mounted) error {
	there, err := m.isMounted()
	if err == nil && there {
		err = unmountThere(m)
	}
	return err
}

func unmountThere(m *mounted) error {
	switch err := mount.Unmount(m.mountPoint); {
	case errors.Is(err, unix.EBUSY):
		return inUse(m.mountPoint, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, fs.ErrNotExist):
		// Somebody else has just unmounted it, or its path leads elsewhere.
		if there, hidden := m.isMountedBy(mount.Reread); there || hidden != nil { // also after a folder above was renamed
			return cmp.Or(hidden, error(&fs.PathError{Op: "unmount", Path: m.mountPoint, Err: err}))
		}
	case err != nil:
		return &fs.PathError{Op: "unmount", Path: m.mountPoint, Err: err}
	}
	return nil
}
