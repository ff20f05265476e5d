// Package storage is what a Storage message means: which device it names,
// where that is mounted, and who holds it. A storage is mounted once and held
// by the sandbox or by containers; the last one to let go has it unmounted, and
// its device proven free.
//
// A call owns what it needs until it has ended: no other call's failure takes that
// away, and its own failure undoes exactly what it has added. Calls wait for disks
// as long as these want, and go on when their caller's time is over: who calls, does
// so in a goroutine of its own (agent/sandbox).
package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/flight"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/agent/state"
	"github.com/directvol/directvol/agent/turns"
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
	state   *state.File
	turns   turns.Turns // by mount point
	devices devices

	mu        sync.Mutex
	past      snapshot // of the state that was read: what is written back as it was
	strangers []stranger
	ended     bool                // the sandbox is destroyed
	mounts    map[string]*mounted // by mount point
	intents   map[string]*mounted // that are being mounted, for the state
	atDisks   map[*mounted]bool   // that calls are at which may wait for the disk
}

// mounted is a storage that is mounted. It is changed in its mount point's turn
// and under Table.mu, so that either is enough to read it: but for its owners and again,
// which Table.mu alone guards, and what which guards. It gets new owners and loses its last
// one in its turn only, and is unmounted in the same one.
type mounted struct {
	request
	made    bool // the mount point's directory is ours to remove
	found   bool // somebody else's mount, that calls under way alone need: it stays where they fail
	again   bool // it is being mounted again
	holders map[string]bool
	calls   map[*call]string // that need it, and for whom: a holder once they have succeeded

	which    sync.Mutex // of from and identity, set in the turn and read at any time
	from     origin
	identity mount.Identity // of the mount that was made or taken over; not known before that

	uuids flight.Flights[origin, string]

	more state.Rest // of its record
}

// call is one Hold under way.
type call struct {
	holder string
	needs  []*mounted
}

// NewTable returns a Table that holds nothing yet. hotplug is how long a
// device is awaited that the guest does not see yet; file is nil where no state is
// kept, which is right for PID 1: the guest ends with it.
func NewTable(log *logrus.Entry, volumes *volume.Table, hotplug time.Duration, file *state.File) *Table {
	return &Table{log: log, volumes: volumes, hotplug: hotplug, state: file, mounts: map[string]*mounted{}, intents: map[string]*mounted{}, atDisks: map[*mounted]bool{}}
}

// Ended reports whether the sandbox is destroyed: nothing can be held then.
func (t *Table) Ended() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ended
}

// End sets what Ended says. It is written down, or stays as it was.
func (t *Table) End(ended bool) error {
	t.mu.Lock()
	was := t.ended
	t.ended = ended
	t.mu.Unlock()
	if was == ended {
		return nil
	}
	err := t.save()
	if err != nil {
		t.mu.Lock()
		t.ended = was
		t.mu.Unlock()
	}
	return err
}

// Hold mounts the storages that are not mounted yet and holds all of them for
// holder: a container's id, or Sandbox. Repeated, it changes nothing. When all are
// there it looks at each once more and asks agreed, which is asked once: by yes
// they are held. Where that says no, or one storage fails, all that this call has
// added is undone before it returns.
//
// If the agent is killed meanwhile, the next agent holds what was added so far.
func (t *Table) Hold(ctx context.Context, holder string, storages []*agentpb.Storage, agreed func() bool) (err error) {
	requests := make([]request, len(storages))
	for i, s := range storages {
		if requests[i], err = parse(s); err != nil {
			return err
		}
	}
	if t.Ended() {
		return errEnded
	}
	c := &call{holder: holder}
	kept := false
	defer func() {
		if !kept { // also where a panic goes through here
			err = errors.Join(err, t.undo(c))
		}
	}()
	for _, r := range requests {
		if err := t.need(ctx, c, r); err != nil {
			return err
		}
	}
	err = t.keep(ctx, c, agreed)
	kept = err == nil
	return err
}

var errEnded = refusal.New(refusal.FailedPrecondition, "the sandbox is destroyed: nothing can be mounted in it")

// need makes one storage the call's.
func (t *Table) need(ctx context.Context, c *call, r request) error {
	from, err := t.find(ctx, "storage "+r.mountPoint, r)
	if err != nil {
		return err
	}
	return t.inTurn(ctx, "mount", r.mountPoint, func() error { return errors.Join(t.needFound(ctx, c, r, from), ctx.Err()) })
}

// find finds a request's source, which may be plugged in only just now.
func (t *Table) find(ctx context.Context, what string, r request) (origin, error) {
	finding, cancel := context.WithTimeout(ctx, t.hotplug)
	defer cancel()
	began := time.Now()
	from, err := r.driver.find(finding, r)
	if err != nil && finding.Err() != nil && refusal.KindOf(err) == refusal.Internal {
		err = refusal.New(refusal.DeadlineExceeded, "%s: no device at %q after %v: is it attached there? %w", what, r.source, time.Since(began).Round(10*time.Millisecond), err)
	}
	return from, err
}

// inTurn runs do in a mount point's turn. do makes system calls that take as long as
// a disk wants.
func (t *Table) inTurn(ctx context.Context, what, mountPoint string, do func() error) error {
	done, err := t.turns.Take(ctx, mountPoint)
	if err != nil {
		return refusal.New(refusal.DeadlineExceeded, "%s %s: another call is at it and has not ended, its disk may not answer: %w", what, mountPoint, err)
	}
	defer done()
	return do()
}

// needFound is need for what is there, in the mount point's turn.
func (t *Table) needFound(ctx context.Context, c *call, r request, from origin) error {
	if m := t.at(r.mountPoint); m != nil {
		if err := t.follow(m, r, from); err != nil {
			return err
		}
		if err := m.agrees(r, from); err != nil {
			return err
		}
		if err := t.mountAgain(ctx, m); err != nil {
			return err
		}
		return t.enter(m, c, r)
	}
	holders, err := t.strangerHolders(r.mountPoint)
	if err != nil {
		return err
	}
	m := &mounted{request: r, from: from, holders: holders, calls: map[*call]string{c: c.holds(r)}}
	if err := t.intend(m); err != nil {
		return err
	}
	defer t.intended(m)
	if err := t.refuseToHide(m); err != nil {
		return err
	}
	did, err := r.driver.mount(ctx, &t.devices, r, from)
	if err != nil {
		return err
	}
	t.mu.Lock()
	m.made, m.found = did.made, did.found
	t.mounts[r.mountPoint] = m
	c.needs = append(c.needs, m)
	t.mu.Unlock()
	t.log.WithFields(logrus.Fields{"mountpoint": r.mountPoint, "device": from.path, "driver": r.driver.name, "fstype": r.fstype}).Info("storage mounted")
	if err := t.adopt(m); err != nil || !r.driver.volume {
		return err
	}
	t.saveOrLog() // now that it is known which mount it is; without that it is known by its disk
	return t.volumes.Own(r.mountPoint, mount.Identity{}, health.Past{})
}

// refuseToHide refuses to mount over a folder above another storage, whose users would
// find something else there. A mount that stands already, and is only taken over, hides what
// it hides: another storage that is in sight is no reason. It goes while begins says that the
// storage is being mounted: of two calls that mount at once, one within the other, one finds
// the other's.
func (t *Table) refuseToHide(m *mounted) error {
	if !m.driver.volume {
		return nil
	}
	top, err := mount.Topmost(m.mountPoint)
	if err != nil {
		return err
	}
	stands := top != nil && m.isOf(m.origin(), top)
	if !stands {
		if err := t.refuseToHideStranger(m); err != nil {
			return err
		}
	}
	for _, inner := range t.known(func(o *mounted) bool { return m.hasNested([]*mounted{o}) }) {
		there, err := inner.driver.there(inner)
		if err != nil {
			return err
		}
		if !stands && (there || t.begins(inner)) {
			return refusal.New(refusal.FailedPrecondition, "storage %s: it would hide storage %s: ask for that after it", m.mountPoint, inner.mountPoint)
		}
	}
	for _, outer := range t.known(func(o *mounted) bool { return o.driver.volume && o.hasNested([]*mounted{m}) }) {
		if !t.begins(outer) {
			continue
		}
		if there, err := outer.driver.there(outer); err != nil {
			return err
		} else if !there {
			return refusal.New(refusal.FailedPrecondition, "storage %s: storage %s is being mounted, and would hide it: call again", m.mountPoint, outer.mountPoint)
		}
	}
	return nil
}

// holds is whom a call would hold a storage for.
func (c *call) holds(r request) string {
	if r.shared {
		return Sandbox
	}
	return c.holder
}

// enter makes a storage that is mounted the call's too.
func (t *Table) enter(m *mounted, c *call, r request) error {
	t.mu.Lock()
	if _, again := m.calls[c]; again { // two of its storages are one
		t.mu.Unlock()
		return nil
	}
	m.calls[c] = c.holds(r)
	c.needs = append(c.needs, m)
	t.mu.Unlock()
	return t.save()
}

// keep has a call hold what it needs, if all of it is still there. It stands
// written down already.
func (t *Table) keep(ctx context.Context, c *call, agreed func() bool) error {
	for _, m := range c.needs {
		err := t.inTurn(ctx, "look at", m.mountPoint, func() error { return m.mustStand() })
		if err != nil {
			return err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return errEnded
	}
	if !agreed() {
		return refusal.New(refusal.DeadlineExceeded, "the call has ended before its storages were held")
	}
	for _, m := range c.needs {
		m.holders[m.calls[c]], m.found = true, false
		delete(m.calls, c)
	}
	return nil
}

// mustStand refuses a storage that is not, or no longer, what it is to be.
func (m *mounted) mustStand() error {
	there, err := m.driver.there(m)
	if err == nil && !there {
		err = refusal.New(refusal.FailedPrecondition, "storage %s: somebody in the guest has unmounted it meanwhile: call again", m.mountPoint)
	}
	return err
}

// undo ends a call that has failed. What nobody else needs it unmounts, where it was
// mounted by a call; what cannot be unmounted is held as if the call had succeeded, so that
// it has an owner.
func (t *Table) undo(c *call) error {
	return t.each(nestedFirst(c.needs), func(m *mounted) error {
		return t.inTurn(context.Background(), "unmount", m.mountPoint, func() error { return t.drop(c, m) })
	})
}

// drop takes a storage from a call, in the mount point's turn.
func (t *Table) drop(c *call, m *mounted) (err error) {
	t.mu.Lock()
	last, found := len(m.calls) == 1 && len(m.holders) == 0, m.found
	t.mu.Unlock()
	switch {
	case last && found:
		t.volumes.Disown(m.mountPoint)
	case last:
		err = t.unmount(context.Background(), m)
	}
	t.mu.Lock()
	if last && err == nil {
		delete(t.mounts, m.mountPoint)
	} else if last {
		m.holders[m.calls[c]] = true
	}
	delete(m.calls, c)
	t.mu.Unlock()
	t.saveOrLog()
	return err
}

// mountAgain mounts a storage that someone else has unmounted.
func (t *Table) mountAgain(ctx context.Context, m *mounted) error {
	defer t.atDisk(m)()
	if there, err := m.driver.there(m); err != nil {
		return err
	} else if there {
		if err := t.adopt(m); err != nil || !m.driver.volume {
			return err
		}
		return t.volumes.Own(m.mountPoint, mount.Identity{}, health.Past{}) // it may be another mount than the last one
	}
	defer t.beginAgain(m)()
	if err := t.refuseToHide(m); err != nil {
		return err
	}
	t.volumes.Forget(m.mountPoint) // what was known of the mount that is gone
	did, err := m.driver.mount(ctx, &t.devices, m.request, m.origin())
	if err == nil {
		m.set(m.origin(), mount.Identity{}) // that of the mount which is gone goes with it
		err = t.adopt(m)
	}
	if err == nil && m.driver.volume {
		err = t.volumes.Own(m.mountPoint, mount.Identity{}, health.Past{})
	}
	if err != nil {
		return err
	}
	t.mu.Lock()
	m.made, m.found = m.made || did.made, false
	t.mu.Unlock()
	t.log.WithField("mountpoint", m.mountPoint).Warn("storage mounted again: it was not there")
	return nil
}

// beginAgain has begins say that a storage is being mounted, until done. It stands written
// down already.
func (t *Table) beginAgain(m *mounted) (done func()) {
	set := func(again bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		m.again = again
	}
	set(true)
	return func() { set(false) }
}

// intend writes down what is about to be mounted, and whether its mount point
// will be one that was made for it.
func (t *Table) intend(m *mounted) error {
	_, err := os.Lstat(m.mountPoint)
	t.mu.Lock()
	m.made = errors.Is(err, fs.ErrNotExist)
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
	if m.driver != r.driver || !m.origin().same(from) || m.fstype != r.fstype {
		return occupied(r, from, m.origin().named(m.fstype))
	}
	if m.options != r.options {
		return refusal.New(refusal.AlreadyExists, "storage %s: %s is mounted there with other options", r.mountPoint, from.path)
	}
	return nil
}

// Release lets go of everything that holder holds, the last mounted first, and
// unmounts what nobody holds any more. What is still in use stays held, and is
// named in the error; Release may be repeated.
func (t *Table) Release(ctx context.Context, holder string) error {
	err := t.each(t.heldBy(func(m *mounted) bool { return m.holders[holder] }), func(m *mounted) error {
		return t.release(ctx, holder, m.mountPoint)
	})
	return errors.Join(err, t.refuseStrangers(holder))
}

// heldBy returns storages, nested ones first.
func (t *Table) heldBy(matches func(*mounted) bool) []*mounted {
	t.mu.Lock()
	defer t.mu.Unlock()
	var found []*mounted
	for _, m := range t.mounts {
		if matches(m) {
			found = append(found, m)
		}
	}
	return nestedFirst(found)
}

// release has a holder let go of a storage.
func (t *Table) release(ctx context.Context, holder, mountPoint string) error {
	return t.inTurn(ctx, "unmount", mountPoint, func() error {
		m := t.at(mountPoint)
		if m == nil {
			return nil
		}
		t.mu.Lock()
		holds, last := m.holders[holder], len(m.holders) == 1 && len(m.calls) == 0
		t.mu.Unlock()
		if !holds {
			return nil
		}
		if last {
			if err := t.unmount(ctx, m); err != nil {
				return err
			}
		}
		t.mu.Lock()
		if delete(m.holders, holder); last {
			delete(t.mounts, mountPoint)
		}
		t.mu.Unlock()
		if last {
			t.saveOrLog()
			return nil
		}
		err := t.save() // or the next agent would have the holder again, whom nobody removes any more
		if err != nil {
			t.mu.Lock()
			m.holders[holder] = true
			t.mu.Unlock()
		}
		return err
	})
}

// saveOrLog is save where nothing hangs on it: an agent after this one finds what
// was not struck out unmounted, or held by a container that is removed again.
func (t *Table) saveOrLog() {
	if err := t.save(); err != nil {
		t.log.Error(err)
	}
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
