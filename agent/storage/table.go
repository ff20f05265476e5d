// Package storage is what a Storage message means: which device it names,
// where that is mounted, and who holds it. A storage is mounted once and held
// by the sandbox or by containers; the last one to let go has it unmounted. A
// call that fails leaves no mount behind that it has made.
package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
)

// Sandbox is the holder of what outlives every container.
const Sandbox = ""

// Table knows the storages and their holders.
type Table struct {
	log     *logrus.Entry
	volumes *volume.Table
	hotplug time.Duration // how long a device that is being plugged in is awaited
	state   *State
	turns   turns
	devices devices

	mu      sync.Mutex
	ended   bool                // the sandbox is destroyed
	mounts  map[string]*mounted // by mount point
	intents map[string]*mounted // that are being mounted, for the state
}

// mounted is a storage that is mounted. It is changed in its mount point's turn
// and under Table.mu, so that either is enough to read it.
type mounted struct {
	request
	from    origin
	made    bool // the mount point's directory is ours to remove
	holders map[string]bool
}

// NewTable returns a Table that holds nothing yet. hotplug is how long a
// device is awaited that the guest does not see yet; state is nil where none is
// kept.
func NewTable(log *logrus.Entry, volumes *volume.Table, hotplug time.Duration, state *State) *Table {
	return &Table{log: log, volumes: volumes, hotplug: hotplug, state: state, mounts: map[string]*mounted{}, intents: map[string]*mounted{}}
}

// Begin takes storages again after ReleaseAll.
func (t *Table) Begin() error { return t.end(false) }

func (t *Table) end(ended bool) error {
	t.mu.Lock()
	was := t.ended
	t.ended = ended
	t.mu.Unlock()
	if was == ended {
		return nil
	}
	err := t.save()
	if err != nil && was { // else it stays destroyed, written down or not
		t.mu.Lock()
		t.ended = true
		t.mu.Unlock()
	}
	return err
}

// Hold mounts the storages that are not mounted yet and holds all of them for
// holder: a container's id, or Sandbox. Repeated, it changes nothing. When one
// storage fails, those that this call has added are let go again. Where the agent
// is killed meanwhile, the next one has what was added so far, and holds it.
func (t *Table) Hold(ctx context.Context, holder string, storages []*agentpb.Storage) error {
	requests := make([]request, len(storages))
	for i, s := range storages {
		r, err := parse(s)
		if err != nil {
			return err
		}
		requests[i] = r
	}
	var added []func(context.Context) error
	for _, r := range requests {
		as := holder
		if r.shared {
			as = Sandbox
		}
		fresh, err := t.hold(ctx, as, r)
		if err != nil {
			return errors.Join(err, unwind(added))
		}
		if fresh {
			added = append(added, func(ctx context.Context) error { return t.release(ctx, as, r.mountPoint) })
		}
	}
	return nil
}

// unwindLimit is how long the undoing of a call that failed may take.
const unwindLimit = 10 * time.Second

func unwind(undo []func(context.Context) error) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), unwindLimit)
	defer cancel()
	for _, f := range slices.Backward(undo) {
		err = errors.Join(err, f(ctx))
	}
	return err
}

// hold adds a holder to one storage; false means that it held it before.
func (t *Table) hold(ctx context.Context, holder string, r request) (fresh bool, err error) {
	finding, cancel := context.WithTimeout(ctx, t.hotplug)
	defer cancel()
	from, err := r.driver.find(finding, r)
	if err != nil {
		if finding.Err() != nil && refusal.KindOf(err) == refusal.Internal {
			err = refusal.New(refusal.DeadlineExceeded, "storage %s: no device at %q after %v: is it attached there? %w", r.mountPoint, r.source, t.hotplug, err)
		}
		return false, err
	}
	return t.inTurn(ctx, "mount", r.mountPoint, func() (bool, error) { return t.holdFound(ctx, holder, r, from) })
}

// inTurn runs do in a mount point's turn, and returns what it does. do makes
// system calls that take as long as a disk wants: when ctx ends first, the turn
// goes on until do returns, and the caller does not wait for it.
func (t *Table) inTurn(ctx context.Context, what, mountPoint string, do func() (bool, error)) (bool, error) {
	late := func() (bool, error) {
		return false, refusal.New(refusal.DeadlineExceeded, "%s %s: not done in time, its disk may not answer: %w", what, mountPoint, ctx.Err())
	}
	done, err := t.turns.take(ctx, mountPoint)
	if err != nil {
		return late()
	}
	type answer struct {
		fresh bool
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		defer done()
		defer func() {
			if p := recover(); p != nil { // nobody above this goroutine does
				t.log.Errorf("%s %s: panic: %v\n%s", what, mountPoint, p, debug.Stack())
				answers <- answer{err: refusal.New(refusal.Internal, "%s %s: the agent has a bug, its log says more", what, mountPoint)}
			}
		}()
		fresh, err := do()
		answers <- answer{fresh, err}
	}()
	select {
	case a := <-answers:
		return a.fresh, a.err
	case <-ctx.Done():
		return late()
	}
}

// holdFound is hold for what is there, in the mount point's turn.
func (t *Table) holdFound(ctx context.Context, holder string, r request, from origin) (fresh bool, err error) {
	m := t.at(r.mountPoint)
	if m != nil {
		if err := m.agrees(r, from); err != nil {
			return false, err
		}
		if err := errors.Join(t.mountAgain(m), ctx.Err()); err != nil {
			return false, err
		}
		return t.enter(m, holder)
	}
	m = &mounted{request: r, from: from, holders: map[string]bool{holder: true}}
	if err := t.intend(m); err != nil {
		return false, err
	}
	defer t.intended(m)
	made, err := r.driver.mount(&t.devices, r, from)
	if err != nil {
		return false, err
	}
	t.mu.Lock()
	m.made = made
	t.mu.Unlock()
	t.log.WithFields(logrus.Fields{"mountpoint": r.mountPoint, "device": from.path, "driver": r.driver.name, "fstype": r.fstype}).Info("storage mounted")
	if err = ctx.Err(); err == nil && r.driver.volume {
		_, err = t.volumes.Lookup(r.mountPoint)
	}
	if err == nil {
		fresh, err = t.enter(m, holder)
	}
	if err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), unwindLimit)
		defer cancel()
		return false, errors.Join(err, t.unmount(ctx, m))
	}
	return fresh, nil
}

// mountAgain mounts a storage that someone else has unmounted.
func (t *Table) mountAgain(m *mounted) error {
	if !m.driver.volume {
		return nil
	}
	if there, err := m.stands(); there || err != nil {
		return err
	}
	t.volumes.Forget(m.mountPoint) // what was known of the mount that is gone
	made, err := m.driver.mount(&t.devices, m.request, m.from)
	if err == nil {
		_, err = t.volumes.Lookup(m.mountPoint)
	}
	if err != nil {
		return err
	}
	t.mu.Lock()
	m.made = m.made || made
	t.mu.Unlock()
	t.log.WithField("mountpoint", m.mountPoint).Warn("storage mounted again: someone had unmounted it")
	return nil
}

// intend writes down what is about to be mounted, and whether its mount point
// will be one that was made for it.
func (t *Table) intend(m *mounted) error {
	_, err := os.Lstat(m.mountPoint)
	m.made = errors.Is(err, fs.ErrNotExist)
	t.mu.Lock()
	t.intents[m.mountPoint] = m
	t.mu.Unlock()
	if err = t.save(); err != nil {
		t.intended(m)
		err = fmt.Errorf("storage %s is not mounted, as the agent could not find it after a restart: %w", m.mountPoint, err)
	}
	return err
}

// intended ends intend. What was mounted stands written down as it is; what was
// not is struck out.
func (t *Table) intended(m *mounted) {
	t.mu.Lock()
	delete(t.intents, m.mountPoint)
	failed := t.mounts[m.mountPoint] != m
	t.mu.Unlock()
	if failed {
		t.saveOrLog()
	}
}

// agrees refuses a request for a mount point where something else is mounted, or
// the same otherwise.
func (m *mounted) agrees(r request, from origin) error {
	if m.driver != r.driver || m.from != from || m.fstype != r.fstype {
		return occupied(r, from, m.from.path, m.fstype)
	}
	if m.flags != r.flags || m.data != r.data {
		return refusal.New(refusal.AlreadyExists, "storage %s: %s is mounted there with other options", r.mountPoint, from.path)
	}
	return nil
}

// enter adds a holder to a storage that is mounted. A new one is written down
// already.
func (t *Table) enter(m *mounted, holder string) (fresh bool, err error) {
	t.mu.Lock()
	if t.ended {
		t.mu.Unlock()
		return false, refusal.New(refusal.FailedPrecondition, "storage %s: the sandbox is destroyed", m.mountPoint)
	}
	first := t.mounts[m.mountPoint] == nil
	fresh = first || !m.holders[holder]
	m.holders[holder] = true
	t.mounts[m.mountPoint] = m
	t.mu.Unlock()
	if first || !fresh {
		return fresh, nil
	}
	if err := t.save(); err != nil {
		t.mu.Lock()
		delete(m.holders, holder)
		t.mu.Unlock()
		return false, err
	}
	return true, nil
}

// Release lets go of everything that holder holds, the last mounted first, and
// unmounts what nobody holds any more. What is still in use stays held, and is
// named in the error; Release may be repeated.
func (t *Table) Release(ctx context.Context, holder string) error {
	var errs []error
	for _, mountPoint := range t.heldBy(func(m *mounted) bool { return m.holders[holder] }) {
		errs = append(errs, t.release(ctx, holder, mountPoint))
	}
	return errors.Join(errs...)
}

// ReleaseAll lets go of every storage, whoever holds it, and takes none until
// Begin. A storage that hangs does not keep others from being unmounted.
func (t *Table) ReleaseAll(ctx context.Context) error {
	if err := t.end(true); err != nil {
		t.log.Error(err) // what is left to unmount is no less so
	}
	all := t.heldBy(func(*mounted) bool { return true })
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, mountPoint := range all {
		if slices.ContainsFunc(all[:i], func(before string) bool { return strings.HasPrefix(before, mountPoint+"/") }) {
			wait.Wait() // for those that are mounted within it
		}
		wait.Go(func() { errs[i] = t.release(ctx, everyone, mountPoint) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// everyone stands for all holders, in release. It is no container's id.
const everyone = "*"

// heldBy returns the mount points of storages, nested ones first.
func (t *Table) heldBy(matches func(*mounted) bool) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var found []string
	for mountPoint, m := range t.mounts {
		if matches(m) {
			found = append(found, mountPoint)
		}
	}
	slices.Sort(found)
	slices.Reverse(found)
	return found
}

// release has a holder, or everyone, let go of a storage.
func (t *Table) release(ctx context.Context, holder, mountPoint string) error {
	_, err := t.inTurn(ctx, "unmount", mountPoint, func() (bool, error) {
		m := t.at(mountPoint)
		if m == nil || holder != everyone && !m.holders[holder] {
			return false, nil
		}
		last := holder == everyone || len(m.holders) == 1
		if last {
			if err := t.unmount(ctx, m); err != nil {
				return false, err
			}
		}
		t.mu.Lock()
		if delete(m.holders, holder); last {
			delete(t.mounts, mountPoint)
		}
		t.mu.Unlock()
		t.saveOrLog()
		return false, nil
	})
	return err
}

// saveOrLog is save where nothing hangs on it: an agent after this one finds what
// was not struck out unmounted, or held by a container that is removed again.
func (t *Table) saveOrLog() {
	if err := t.save(); err != nil {
		t.log.Error(err)
	}
}

// unmount unmounts a storage, and removes the mount point that was made for it.
func (t *Table) unmount(ctx context.Context, m *mounted) error {
	if err := t.volumes.Unmount(ctx, m.mountPoint, func() error { return m.driver.unmount(m) }); err != nil {
		return err
	}
	t.log.WithFields(logrus.Fields{"mountpoint": m.mountPoint, "device": m.from.path}).Info("storage unmounted")
	return nil
}

// Mount is a storage that is mounted.
type Mount struct{ MountPoint, Driver string }

// Mounted returns the storages that somebody holds, in no order.
func (t *Table) Mounted() []Mount {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]Mount, 0, len(t.mounts))
	for mountPoint, m := range t.mounts {
		all = append(all, Mount{mountPoint, m.driver.name})
	}
	return all
}

func (t *Table) at(mountPoint string) *mounted {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mounts[mountPoint]
}
