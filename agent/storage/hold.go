package storage

import (
	"context"
	"errors"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/agentpb"
)

// call is one Hold in progress.
type call struct {
	holder string
	needs  []*mounted
}

// holds returns the holder for whom the call would hold a storage.
func (c *call) holds(r request) string {
	if r.shared {
		return Sandbox
	}
	return c.holder
}

// Hold mounts the storages that are not mounted yet, and holds all of them for holder, which is a
// container's id or Sandbox. A repeated call changes nothing. When all are mounted, Hold checks
// each once more and calls agreed once: if agreed returns true, they are held. If agreed returns
// false or one storage fails, Hold undoes all that it has added before it returns.
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
		if !kept { // also after a panic
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

// need adds one storage to those that the call needs.
func (t *Table) need(ctx context.Context, c *call, r request) error {
	from, err := t.find(ctx, "storage "+r.mountPoint, r)
	if err != nil {
		return err
	}
	return t.inTurn(ctx, "mount", r.mountPoint, func() error { return errors.Join(t.needFound(ctx, c, r, from), ctx.Err()) })
}

// find finds a request's source, which may still be being plugged in.
func (t *Table) find(ctx context.Context, what string, r request) (origin, error) {
	finding, cancel := context.WithTimeout(ctx, t.hotplug)
	defer cancel()
	began := time.Now()
	from, err := r.driver.find(finding, r)
	if err != nil && finding.Err() != nil && errkind.Of(err) == errkind.Internal {
		err = errkind.New(errkind.DeadlineExceeded, "%s: no device at %q after %v: is it attached there? %w", what, r.source, time.Since(began).Round(10*time.Millisecond), err)
	}
	return from, err
}

// needFound is need after the source was found. The caller has the mount point's turn.
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
	holders, err := t.strangerHolders(ctx, r.mountPoint)
	if err != nil {
		return err
	}
	m := &mounted{request: r, from: from, holders: holders, calls: map[*call]string{c: c.holds(r)}}
	if err := t.recordMounting(m); err != nil {
		return err
	}
	defer t.recordMounted(m)
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
	t.saveOrLog() // now that the mount's identity is known; without it, the storage is identified by its disk
	return t.own(m)
}

// agrees refuses a request whose driver, source, filesystem or options differ from those of the
// storage at its mount point.
func (m *mounted) agrees(r request, from origin) error {
	if m.driver != r.driver || !m.origin().same(from) || m.fstype != r.fstype {
		return occupied(r, from, m.origin().named(m.fstype))
	}
	if m.options != r.options {
		return errkind.New(errkind.AlreadyExists, "storage %s: %s is mounted there with other options", r.mountPoint, from.path)
	}
	return nil
}

// enter adds a storage that is mounted already to those that the call needs.
func (t *Table) enter(m *mounted, c *call, r request) error {
	t.mu.Lock()
	if _, again := m.calls[c]; again { // two storages of the call are the same
		t.mu.Unlock()
		return nil
	}
	m.calls[c] = c.holds(r)
	c.needs = append(c.needs, m)
	t.mu.Unlock()
	return t.save()
}

// keep makes the holder of a call hold all that the call needs, if all of it is still mounted. The
// state file names the holder already.
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
		return errkind.New(errkind.DeadlineExceeded, "the call has ended before its storages were held")
	}
	for _, m := range c.needs {
		m.holders[m.calls[c]], m.found = true, false
		delete(m.calls, c)
	}
	return nil
}

// mustStand refuses a storage that is not mounted any more.
func (m *mounted) mustStand() error {
	there, err := m.driver.there(m)
	if err == nil && !there {
		err = errkind.New(errkind.FailedPrecondition, "storage %s: somebody in the guest has unmounted it meanwhile: call again", m.mountPoint)
	}
	return err
}

// undo reverts a call that has failed. It unmounts the storages that a call has mounted and nobody
// else needs. A storage that cannot be unmounted is held as if the call had succeeded, so that it
// has an owner.
func (t *Table) undo(c *call) error {
	return t.each(nestedFirst(c.needs), func(m *mounted) error {
		return t.inTurn(context.Background(), "unmount", m.mountPoint, func() error { return t.drop(c, m) })
	})
}

// drop removes a storage from a call. The caller has the mount point's turn.
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
