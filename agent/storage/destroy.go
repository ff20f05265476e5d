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

// restoreLimit is how long a destroy that has failed waits for what it gives back: a
// disk may hang by then.
const restoreLimit = 10 * time.Second

// ReleaseAll lets go of every storage, whoever holds it, and takes none until
// End(false). Where one cannot go, or agreed, asked once at the end, says no, all stay:
// those that this call has unmounted by then are mounted again, as they were. One whose
// disk hangs comes back when it answers, and keeps nobody else. A stranger on a disk comes
// back unless all others had gone by then: its last mount ends before it is agreed, so
// that success is true of its disk, too. No other call may be under way.
func (t *Table) ReleaseAll(ctx context.Context, agreed func() bool) error {
	strangers, err := t.leavers()
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
	if err == nil && !agreed() { // from here on the caller waits: no disk is asked any more
		err = errkind.New(errkind.DeadlineExceeded, "the call has ended before everything was unmounted")
	}
	if err == nil {
		err = t.endEmpty()
	}
	leaving.decide(err == nil)
	return err
}

// endEmpty writes down that the sandbox is destroyed and nothing is held, or leaves
// what is held as it was.
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

// departure is a ReleaseAll's unmounting of everything.
type departure struct {
	all       []*departing
	decided   chan struct{} // closed when it is known whether
	succeeded bool          // all have gone
	proving   sync.Mutex    // a stranger's disk free
}

// departing is one storage of it.
type departing struct {
	*mounted
	unmounting *step
	last       *step      // that was begun: for who has called leave
	steps      chan *step // that follow unmounting, until it is decided
	layers     []layer    // what has gone, from above to below
	disks      []mount.Device
	done       chan struct{} // closed when it is mounted again, or need not be
}

// layer is one of the mounts that lie on each other at a mount point.
type layer struct {
	kept *os.File // a second mount of it, or nil
	past health.Past
}

// step is something that each storage does in its turn.
type step struct {
	do   func(*departing) error
	once sync.Once
	done chan struct{} // closed when it has ended, or was not done
	err  error         // of that
}

func (s *step) report(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.done)
	})
}

// leave begins to unmount storages, nested ones first. Each stays in its turn until it
// is decided.
func (t *Table) leave(ctx context.Context, all []*mounted) *departure {
	d := &departure{decided: make(chan struct{})}
	for _, m := range all { // before any of them proves its disk free
		t.setLeaving(m.mountPoint, true)
	}
	for _, m := range all {
		before := d.all
		first := &step{done: make(chan struct{})}
		one := &departing{mounted: m, unmounting: first, last: first, steps: make(chan *step, 1), done: make(chan struct{})}
		d.all = append(d.all, one)
		go func() {
			defer close(one.done)
			defer t.setLeaving(m.mountPoint, false)
			for _, other := range before {
				if m.hasNested([]*mounted{other.mounted}) {
					select {
					case <-other.unmounting.done:
					case <-d.decided: // then it stays
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

// depart unmounts a storage, in its turn, and mounts it again where the others stay.
func (t *Table) depart(ctx context.Context, d *departure, one *departing) error {
	m := one.mounted
	if err := ctx.Err(); err != nil || isClosed(d.decided) {
		return err
	}
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
		if other.hasNested([]*mounted{m}) {
			<-other.done // or it would cover this one
		}
	}
	for _, gone := range slices.Backward(one.layers) {
		err = errors.Join(err, t.putBack(m, gone))
	}
	return err
}

// takeAway unmounts a storage, of a stranger the topmost mount, and notes how to put it back.
func (t *Table) takeAway(ctx context.Context, one *departing, was bool) (err error) {
	var gone layer
	t.noteDisks(one)
	if was {
		if gone.kept, err = keepMount(one.mounted); err != nil {
			return err
		}
	}
	_, gone.past = t.volumes.Past(one.mountPoint)
	if err = t.unmount(ctx, one.mounted); err != nil && one.driver == foreign { // then it is there
		gone.kept.Close()
		return err
	}
	one.layers = append(one.layers, gone)
	return err
}

// follow takes the steps that letGo asks for, until it is decided.
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

// letGo ends the last mounts of strangers on disks, when all else has gone, and when each of
// their disks has just answered: a mount that hangs as it ends cannot be put back. Mounts in
// memory are kept until it is decided.
func (d *departure) letGo(ctx context.Context) error {
	for _, do := range []func(*departing) error{(*departing).flushDisks, (*departing).closeOnDisk, d.proveDisksFree} {
		for _, one := range d.all {
			one.last = &step{done: make(chan struct{}), do: func(one *departing) error {
				if err := ctx.Err(); err != nil { // it is put back
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
			_ = blockdev.Flush(device.Path) // a failure is for fsync's callers to know
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

// proveDisksFree is for one after the other: two may have one disk, and would meet each
// other's claim of it.
func (d *departure) proveDisksFree(one *departing) error {
	d.proving.Lock()
	defer d.proving.Unlock()
	for _, disk := range one.disks {
		if path, err := inUseStill(disk); err != nil {
			return stillInUse(one.mountPoint, path, disk.Number, err)
		}
	}
	return nil
}

// close lets go of what is kept still.
func (one *departing) close() {
	for _, gone := range one.layers {
		gone.kept.Close()
	}
}

// await waits until everything is unmounted, or the step after that is done.
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

// decide tells all whether they stay away, and waits for those that come back.
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

// UnmountEach unmounts what can be unmounted, whatever becomes of the rest: for the
// guest's end, when ReleaseAll has failed.
func (t *Table) UnmountEach(ctx context.Context) error {
	return t.each(t.heldBy(func(*mounted) bool { return true }), func(m *mounted) error {
		return t.inTurn(ctx, "unmount", m.mountPoint, func() error { return t.unmount(ctx, m) })
	})
}

// keepMount returns a second mount of what cannot be mounted again as it was: a tmpfs, whose
// contents are lost with its last mount, and a stranger, where the kernel allows it. Its disk
// is in use until that is closed.
func keepMount(m *mounted) (*os.File, error) {
	if m.fstype != "tmpfs" && m.driver != foreign {
		return nil, nil
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.mountPoint, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EINVAL) && m.driver == foreign: // an unbindable one
		return nil, nil
	case err != nil:
		return nil, &fs.PathError{Op: "open_tree", Path: m.mountPoint, Err: err}
	}
	return os.NewFile(uintptr(fd), m.mountPoint), nil
}

// putBack mounts a storage again, where it is gone, and has its watch remember.
func (t *Table) putBack(m *mounted, gone layer) error {
	there, err := m.driver.there(m)
	if m.driver == foreign {
		there = false // another one of its mounts is
	}
	switch {
	case err != nil || there && gone.kept != nil:
		return err
	case gone.kept == nil && m.driver == foreign:
		return errkind.New(errkind.FailedPrecondition, "storage %s is unmounted, and how it was mounted is not known", m.mountPoint)
	case gone.kept == nil:
		err = t.mountAgain(context.Background(), m)
	default:
		if _, err = makeMountPoint(m.mountPoint); err == nil {
			err = mount.Place(gone.kept, m.mountPoint)
		}
		if err == nil && m.driver == foreign {
			err = t.volumes.Observe(m.mountPoint)
		}
	}
	if !there { // or its watch has never forgotten it
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
