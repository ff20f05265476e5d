// Package volume is the heart of the agent: one mounted volume, and the table
// of them. The kernel's mountinfo is the truth, so that a volume which someone
// else has mounted is a volume too; the table only remembers what it has seen.
// A volume grows by one call at a time, under its own lock, and is not unmounted
// meanwhile.
package volume

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/refusal"
)

// Table finds volumes by where they are mounted.
type Table struct {
	monitor *health.Monitor

	mu      sync.Mutex
	volumes map[string]*Volume // by mount point
}

// NewTable returns a Table whose volumes are watched by monitor.
func NewTable(monitor *health.Monitor) *Table {
	return &Table{monitor: monitor, volumes: map[string]*Volume{}}
}

// Monitor returns what watches the volumes.
func (t *Table) Monitor() *health.Monitor { return t.monitor }

// Volume is one mount, for as long as it is mounted.
type Volume struct {
	Mountpoint string
	FSType     string          // as mountinfo has it
	Device     blockdev.Device // zero where no block device is below
	mountID    int
	watch      *health.Watch // nil where no block device is below
	growing    chan struct{} // the lock: a call that waits for it can be given up

	mu        sync.Mutex
	measuring *measurement // nil where none is under way
	last      *Stats       // nil until one has succeeded
}

// Lookup returns the volume that is mounted at path. What does not exist is
// NotFound, what is no mount point InvalidArgument.
func (t *Table) Lookup(path string) (*Volume, error) { return t.Recall(path, 0, health.Past{}) }

// Recall is Lookup after the agent's restart: past is what it had remembered of
// the mount with an id. It is of no account where another one is there now, or
// the volume is known already.
func (t *Table) Recall(path string, pastMount int, past health.Past) (*Volume, error) {
	if !filepath.IsAbs(path) {
		return nil, refusal.New(refusal.InvalidArgument, "volume path %.200q is not absolute", path)
	}
	path = filepath.Clean(path)
	mountID, err := mountIDOf(path)
	if err != nil {
		t.Forget(path) // someone else has unmounted it
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.volumes[path]; v != nil {
		if mountID == unknownMount || mountID == v.mountID {
			return v, nil
		}
		// Asked again: another call may have found the new mount meanwhile.
		if mountID, err = mountIDOf(path); err == nil && mountID == v.mountID {
			return v, nil
		}
		t.forget(v)
	}
	v, err := t.discover(path, mountID, pastMount, past)
	if err != nil {
		return nil, err
	}
	t.volumes[path] = v
	return v, nil
}

// Unmount has unmount run as Quiet does, and forgets the volume where it is gone.
func (t *Table) Unmount(ctx context.Context, path string, unmount func() (gone bool, err error)) error {
	return t.quiet(ctx, path, unmount)
}

// Quiet calls do while neither a probe nor a growth is in the volume at path. If one
// of them has not ended before ctx, Quiet returns an error and does not call do.
func (t *Table) Quiet(ctx context.Context, path string, do func() error) error {
	return t.quiet(ctx, path, func() (bool, error) { return false, do() })
}

func (t *Table) quiet(ctx context.Context, path string, do func() (gone bool, err error)) error {
	t.mu.Lock()
	v := t.volumes[path]
	t.mu.Unlock()
	if v == nil {
		_, err := do()
		return err
	}
	if err := v.lock(ctx); err != nil {
		return err
	}
	defer v.unlock()
	if v.watch != nil {
		if err := v.watch.Pause(ctx); err != nil {
			return refusal.New(refusal.DeadlineExceeded, "volume %s: a probe of it hangs, the disk below %s does not answer: %w", path, v.Device.Path, err)
		}
	}
	var gone bool
	defer func() { // also where do panics
		if gone {
			t.Forget(path)
		} else if v.watch != nil {
			v.watch.Resume()
		}
	}()
	var err error
	gone, err = do()
	return err
}

// Past returns what the watch of the volume at path remembers, and of which
// mount: nothing, and 0, where no volume is watched there.
func (t *Table) Past(path string) (mountID int, past health.Past) {
	t.mu.Lock()
	v := t.volumes[path]
	t.mu.Unlock()
	if v == nil || v.watch == nil {
		return 0, health.Past{}
	}
	return v.mountID, v.watch.Past()
}

// Forget ends what the table knows of the volume at path, if there is one.
func (t *Table) Forget(path string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.volumes[path]; v != nil {
		t.forget(v)
	}
}

// forget ends what the table does with a volume. t.mu is held, so nothing is waited
// for: an unmount may have paused the watch for as long as its probe hangs.
func (t *Table) forget(v *Volume) {
	delete(t.volumes, v.Mountpoint)
	if v.watch != nil {
		go v.watch.End()
	}
}

// unknownMount is the id of a mount whose root cannot be read, such as that of
// an xfs that has shut down.
const unknownMount = -1

func mountIDOf(path string) (int, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_MNT_ID, &st)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG):
		return 0, refusal.New(refusal.NotFound, "volume %.200q does not exist in this guest", path)
	case err != nil, st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0:
		return unknownMount, nil // mountinfo tells; a kernel before 5.8 cannot
	case st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0:
		return 0, refusal.New(refusal.InvalidArgument, "%.200q is no mount point: name the path that the volume is mounted at", path)
	}
	return int(st.Mnt_id), nil
}

// discover makes a Volume of what mountinfo says.
func (t *Table) discover(path string, mountID, pastMount int, past health.Past) (*Volume, error) {
	mounts, err := MountsAt(path)
	if err != nil {
		return nil, err
	}
	info, err := pick(mounts, mountID)
	if err != nil {
		return nil, refusal.New(refusal.NotFound, "volume %.200q: %w", path, err)
	}
	v := &Volume{Mountpoint: path, FSType: info.FSType, mountID: info.ID, growing: make(chan struct{}, 1)}
	if info.Major == 0 {
		return v, nil // tmpfs, virtio-fs, overlay: no block device below
	}
	number := unix.Mkdev(uint32(info.Major), uint32(info.Minor))
	v.Device, err = blockdev.ByNumber(number)
	if errors.Is(err, fs.ErrNotExist) { // pulled from under the mount
		v.Device, err = blockdev.Device{Path: info.Source, Name: filepath.Base(info.Source), Number: number}, nil
	}
	if err != nil {
		return nil, err
	}
	if v.mountID != pastMount {
		past = health.Past{}
	}
	v.watch = t.monitor.Watch(health.Target{Mountpoint: path, FSType: v.FSType, Device: v.Device}, past)
	return v, nil
}

// lock waits for the volume's lock until shortly before ctx ends: who waits is to
// learn for what.
func (v *Volume) lock(ctx context.Context) error {
	ctx, cancel := deadline.Early(ctx)
	defer cancel()
	select {
	case v.growing <- struct{}{}: // also where there is no time to wait
		return nil
	default:
	}
	select {
	case v.growing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return refusal.New(refusal.DeadlineExceeded, "volume %s is being resized or unmounted by another call: %w", v.Mountpoint, ctx.Err())
	}
}

func (v *Volume) unlock() { <-v.growing }
