package storage

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// restoreLimit bounds how long a failed destroy waits for the storages that it mounts again. A disk
// may hang by then.
const restoreLimit = 10 * time.Second

// ReleaseAll releases every storage, whoever holds it, and refuses new ones until End(false). If
// one cannot be unmounted, or agreed returns false, all stay: the storages that this call has
// already unmounted are mounted again as they were. agreed is called once, at the end. A storage
// whose disk hangs is mounted again when its disk answers; the others do not wait for it. Strangers
// on disks are an exception: when all else is unmounted, their last mounts end before agreed is
// called, so that success means their disks are free, too. From then on they are not mounted again.
// No other call may be in progress.
func (t *Table) ReleaseAll(ctx context.Context, agreed func() bool) error {
	strangers, err := t.leavers(ctx)
	if err != nil {
		return err
	}
	all := nestedFirst(append(t.heldBy(func(*mounted) bool { return true }), strangers...))
	if err := t.each(all, func(m *mounted) error { return t.couldGo(ctx, m, all) }); err != nil {
		return err
	}
	leaving := t.leave(ctx, all)
	err = leaving.await(ctx)
	if err == nil {
		err = leaving.letGo(ctx)
	}
	if err == nil && !agreed() { // the caller waits from here on: no disk is accessed any more
		err = errkind.New(errkind.DeadlineExceeded, "the call has ended before everything was unmounted")
	}
	if err == nil {
		err = t.endEmpty()
	}
	leaving.decide(err == nil)
	return err
}

// endEmpty records that the sandbox is destroyed and nothing is held. If that fails, the storages
// stay held as they were.
func (t *Table) endEmpty() error {
	t.mu.Lock()
	were := t.mounts
	t.mounts = map[string]*mounted{}
	t.mu.Unlock()
	err := t.End(true)
	if err != nil {
		t.mu.Lock()
		t.mounts = were
		t.mu.Unlock()
	}
	return err
}

// departure is the unmounting of all storages by one ReleaseAll.
type departure struct {
	all       []*departing
	decided   chan struct{} // closed when succeeded is known
	succeeded bool          // all storages have gone
	devices   *devices      // of the table
}

// departing is one storage of a departure.
type departing struct {
	*mounted
	unmounting *step
	last       *step      // the step that was begun last; used by the goroutine that called leave
	steps      chan *step // the steps that follow unmounting, until the departure is decided
	layers     []layer    // the mounts that are gone, topmost first
	disks      []mount.Device
	done       chan struct{} // closed when the storage is mounted again, or need not be
}

// layer is one of several mounts stacked at a mount point.
type layer struct {
	kept *os.File // a second mount of the same tree, or nil
	past health.Past
}

// step is an action that each storage performs in its turn.
type step struct {
	do   func(*departing) error
	once sync.Once
	done chan struct{} // closed when the step has ended or was skipped
	err  error         // of the step
}

func (s *step) report(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.done)
	})
}

// leave starts to unmount storages, nested ones first. Each keeps its turn until the departure is
// decided.
func (t *Table) leave(ctx context.Context, all []*mounted) *departure {
	d := &departure{decided: make(chan struct{}), devices: &t.devices}
	for _, m := range all { // before any of them proves its disk free
		t.setLeaving(m.mountPoint, d, true)
	}
	for _, m := range all {
		before := d.all
		first := &step{done: make(chan struct{})}
		one := &departing{mounted: m, unmounting: first, last: first, steps: make(chan *step, 1), done: make(chan struct{})}
		d.all = append(d.all, one)
		go func() {
			defer close(one.done)
			defer t.setLeaving(m.mountPoint, d, false)
			for _, other := range before {
				if m.contains(other.mounted) {
					select {
					case <-other.unmounting.done:
					case <-d.decided: // the nested storage stays mounted
					}
				}
			}
			err := t.safely(m, func(m *mounted) error {
				return t.inTurn(ctx, "unmount", m.mountPoint, func() error { return t.depart(ctx, d, one) })
			})
			if one.unmounting.report(err); err != nil {
				t.log.Warnf("storage %s, as the sandbox is destroyed: %v", m.mountPoint, err)
			}
		}()
	}
	return d
}

// depart unmounts a storage in its turn, and mounts it again if the departure fails.
func (t *Table) depart(ctx context.Context, d *departure, one *departing) error {
	m := one.mounted
	if err := ctx.Err(); err != nil || isClosed(d.decided) {
		return err
	}
	defer t.departs(m, d)()
	was, err := m.driver.there(m)
	defer one.close()
	for again := true; err == nil && again; {
		if err = t.takeAway(ctx, one, was); err == nil && m.driver == foreign {
			again, err = m.driver.there(m)
		} else {
			again = false
		}
	}
	one.unmounting.report(err)
	one.follow(d.decided)
	if d.succeeded || !was {
		return err
	}
	for _, other := range d.all {
		if other.contains(m) {
			<-other.done // otherwise the nested one would be covered
		}
	}
	for _, gone := range slices.Backward(one.layers) {
		err = errors.Join(err, t.putBack(m, gone))
	}
	return err
}

// departs notes which departure is at a storage, until done is called. The caller has the mount
// point's turn.
func (t *Table) departs(m *mounted, d *departure) (done func()) {
	set := func(d *departure) {
		t.mu.Lock()
		defer t.mu.Unlock()
		m.departure = d
	}
	set(d)
	return func() { set(nil) }
}

// takeAway unmounts a storage (of a stranger, the topmost mount) and notes how to restore it.
func (t *Table) takeAway(ctx context.Context, one *departing, was bool) (err error) {
	var gone layer
	t.noteDisks(one)
	if was {
		if gone.kept, err = keepMount(one.mounted); err != nil {
			return err
		}
	}
	gone.past = t.volumes.Past(one.mountPoint, one.mount())
	if err = t.unmount(ctx, one.mounted); err != nil && one.driver == foreign { // it is still mounted
		gone.kept.Close()
		return err
	}
	one.layers = append(one.layers, gone)
	return err
}

// follow runs the steps that letGo sends, until the departure is decided.
func (one *departing) follow(decided <-chan struct{}) {
	for {
		select {
		case next := <-one.steps:
			next.report(next.do(one))
		case <-decided:
			return
		}
	}
}

// letGo ends the last mounts of strangers on disks. It does so when all else has gone and each of
// their disks has just answered, because a mount that hangs while it ends cannot be restored.
// Mounts in memory are kept until the departure is decided.
func (d *departure) letGo(ctx context.Context) error {
	prove := func(one *departing) error { return d.proveDisksFree(ctx, one) }
	for _, do := range []func(*departing) error{(*departing).flushDisks, (*departing).closeOnDisk, prove} {
		for _, one := range d.all {
			one.last = &step{done: make(chan struct{}), do: func(one *departing) error {
				if err := ctx.Err(); err != nil { // too late: the storage is mounted again
					return one.late(err)
				}
				return do(one)
			}}
			one.steps <- one.last
		}
		if err := d.await(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (one *departing) flushDisks() error {
	for _, disk := range one.disks {
		device, err := blockdev.ByNumber(disk.Number)
		if err == nil {
			_ = blockdev.Flush(device.Path) // errors are reported to callers of fsync
		}
	}
	return nil
}

func (one *departing) closeOnDisk() error {
	for i, gone := range one.layers {
		if gone.kept == nil || one.driver != foreign {
			continue
		}
		var about unix.Statfs_t
		if err := unix.Fstatfs(int(gone.kept.Fd()), &about); err == nil && about.Type == unix.TMPFS_MAGIC {
			continue
		}
		gone.kept.Close()
		one.layers[i].kept = nil
	}
	return nil
}

// proveDisksFree refuses a stranger's disks that are still in use.
func (d *departure) proveDisksFree(ctx context.Context, one *departing) error {
	for _, disk := range one.disks {
		path, err := d.devices.inUseStill(ctx, disk)
		if errkind.Of(err) == errkind.DeadlineExceeded {
			return err
		}
		if err != nil {
			return stillInUse(one.mountPoint, path, disk.Number, err)
		}
	}
	return nil
}

// close closes the second mounts that are still kept.
func (one *departing) close() {
	for _, gone := range one.layers {
		gone.kept.Close()
	}
}

// await waits until every storage has ended its last step: unmounting, or one of letGo's.
func (d *departure) await(ctx context.Context) error {
	var errs []error
	for _, one := range d.all {
		select {
		case <-one.last.done:
			errs = append(errs, one.last.err)
		case <-ctx.Done():
			return errors.Join(append(errs, one.late(ctx.Err()))...)
		}
	}
	return errors.Join(errs...)
}

func (one *departing) late(err error) error {
	return errkind.New(errkind.DeadlineExceeded, "unmount %s: not done in time, its disk may not answer: %w", one.mountPoint, err)
}

// decide ends the departure and waits, up to restoreLimit, for the storages that are mounted again.
func (d *departure) decide(succeeded bool) {
	d.succeeded = succeeded
	close(d.decided)
	limit := time.NewTimer(restoreLimit)
	defer limit.Stop()
	for _, one := range d.all {
		select {
		case <-one.last.done:
		default:
			continue // its disk hangs
		}
		select {
		case <-one.done:
		case <-limit.C:
			return
		}
	}
}

// UnmountEach unmounts every storage that can be unmounted, even if others fail. It is for the
// shutdown of the guest, after ReleaseAll has failed.
func (t *Table) UnmountEach(ctx context.Context) error {
	return t.each(t.heldBy(func(*mounted) bool { return true }), func(m *mounted) error {
		return t.inTurn(ctx, "unmount", m.mountPoint, func() error { return t.unmount(ctx, m) })
	})
}

// keepMount returns a second mount of a storage that cannot be mounted again as it was: a tmpfs,
// whose contents are lost with its last mount, or a stranger, if the kernel allows it. The disk
// stays in use until the returned file is closed.
func keepMount(m *mounted) (*os.File, error) {
	if m.fstype != "tmpfs" && m.driver != foreign {
		return nil, nil
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.mountPoint, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EINVAL) && m.driver == foreign: // the mount is unbindable
		return nil, nil
	case err != nil:
		return nil, &fs.PathError{Op: "open_tree", Path: m.mountPoint, Err: err}
	}
	return os.NewFile(uintptr(fd), m.mountPoint), nil
}

// putBack mounts a storage again if it is gone, and restores what its watch remembered.
func (t *Table) putBack(m *mounted, gone layer) error {
	there, err := m.driver.there(m)
	if m.driver == foreign {
		there = false // another mount of the stranger may be there
	}
	switch {
	case err != nil || there && gone.kept != nil:
		return err
	case gone.kept == nil && m.driver == foreign:
		return errkind.New(errkind.FailedPrecondition, "storage %s is unmounted, and cannot be mounted again: its options are unknown", m.mountPoint)
	case gone.kept == nil:
		err = t.mountAgain(context.Background(), m)
	default:
		was := m.mount()
		if m.driver != foreign {
			t.disclaim(m)
		}
		if _, err = makeMountPoint(m.mountPoint); err == nil {
			err = mount.Place(gone.kept, m.mountPoint)
		}
		if err == nil && m.driver == foreign {
			err = t.volumes.Observe(m.mountPoint)
		} else if err == nil {
			err = t.adopt(m)
		}
		if err != nil {
			m.set(m.origin(), was)
		}
	}
	if !there { // otherwise the watch has never forgotten
		t.saveOrLog() // now that the mount's identity is known
		t.volumes.Remember(m.mountPoint, gone.past)
	}
	return err
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
