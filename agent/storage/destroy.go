package storage

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/refusal"
)

// restoreLimit is how long a destroy that has failed waits for what it gives back: a
// disk may hang by then.
const restoreLimit = 10 * time.Second

// ReleaseAll lets go of every storage, whoever holds it, and takes none until
// End(false). Where one cannot go, or agreed, asked once at the end, says no, all stay:
// those that this call has unmounted by then are mounted again, as they were. One whose
// disk hangs comes back when it answers, and keeps nobody else. No other call may be
// under way.
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
	if err == nil && !agreed() { // from here on the caller waits: no disk is asked any more
		err = refusal.New(refusal.DeadlineExceeded, "the call has ended before everything was unmounted")
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
}

// departing is one storage of it.
type departing struct {
	*mounted
	once sync.Once
	gone chan struct{} // closed when unmount has returned, or was not called
	err  error         // of that
	done chan struct{} // closed when it is mounted again, or need not be
}

func (one *departing) report(err error) {
	one.once.Do(func() {
		one.err = err
		close(one.gone)
	})
}

// leave begins to unmount storages, nested ones first. Each stays in its turn until it
// is decided.
func (t *Table) leave(ctx context.Context, all []*mounted) *departure {
	d := &departure{decided: make(chan struct{})}
	for _, m := range all {
		before := d.all
		one := &departing{mounted: m, gone: make(chan struct{}), done: make(chan struct{})}
		d.all = append(d.all, one)
		go func() {
			defer close(one.done)
			t.setLeaving(m.mountPoint, true)
			defer t.setLeaving(m.mountPoint, false)
			for _, other := range before {
				if m.hasNested([]*mounted{other.mounted}) {
					select {
					case <-other.gone:
					case <-d.decided: // then it stays
					}
				}
			}
			err := t.safely(m, func(m *mounted) error {
				return t.inTurn(ctx, "unmount", m.mountPoint, func() error { return t.depart(ctx, d, one) })
			})
			if one.report(err); err != nil {
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
	var kept *os.File
	if err == nil && was {
		kept, err = keepMount(m)
	}
	if kept != nil {
		defer kept.Close()
	}
	_, past := t.volumes.Past(m.mountPoint)
	if err == nil {
		err = t.unmount(ctx, m)
	}
	one.report(err)
	<-d.decided
	if d.succeeded || !was {
		return err
	}
	for _, other := range d.all {
		if other.hasNested([]*mounted{m}) {
			<-other.done // or it would cover this one
		}
	}
	stayed, _ := m.driver.there(m)
	err = errors.Join(err, t.putBack(m, kept))
	if !stayed { // or its watch has never forgotten it
		t.volumes.Remember(m.mountPoint, past)
	}
	return err
}

// await waits until everything is unmounted.
func (d *departure) await(ctx context.Context) error {
	var errs []error
	for _, one := range d.all {
		select {
		case <-one.gone:
			errs = append(errs, one.err)
		case <-ctx.Done():
			return errors.Join(append(errs, refusal.New(refusal.DeadlineExceeded, "unmount %s: not done in time, its disk may not answer: %w", one.mountPoint, ctx.Err()))...)
		}
	}
	return errors.Join(errs...)
}

// decide tells all whether they stay away, and waits for those that come back.
func (d *departure) decide(succeeded bool) {
	d.succeeded = succeeded
	close(d.decided)
	limit := time.NewTimer(restoreLimit)
	defer limit.Stop()
	for _, one := range d.all {
		select {
		case <-one.gone:
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
// is free when that is closed.
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

// putBack mounts a storage again, where it is gone.
func (t *Table) putBack(m *mounted, kept *os.File) error {
	if kept == nil {
		return t.mountAgain(context.Background(), m)
	}
	if there, err := m.driver.there(m); there || err != nil {
		return err
	}
	if _, err := makeMountPoint(m.mountPoint); err != nil {
		return err
	}
	return place(kept, m.mountPoint)
}
