package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
)

// recordMounting writes the storage that is about to be mounted to the state file, and notes
// whether its mount point has to be made.
func (t *Table) recordMounting(m *mounted) error {
	_, err := os.Lstat(m.mountPoint)
	t.mu.Lock()
	m.made = errors.Is(err, fs.ErrNotExist)
	t.intents[m.mountPoint] = m
	t.mu.Unlock()
	if err = t.save(); err != nil {
		t.recordMounted(m)
		err = fmt.Errorf("storage %s is not mounted, as the agent could not find it after a restart: %w", m.mountPoint, err)
	}
	return err
}

// recordMounted clears the intent. It removes the storage's record if the mount failed.
func (t *Table) recordMounted(m *mounted) {
	t.mu.Lock()
	delete(t.intents, m.mountPoint)
	failed := t.mounts[m.mountPoint] != m
	t.mu.Unlock()
	if failed {
		t.saveOrLog()
	}
}

// mountAgain mounts a storage that somebody else has unmounted, with its present options. If
// somebody else has mounted it again, mountAgain takes that mount over, if it has these options.
func (t *Table) mountAgain(ctx context.Context, m *mounted) error {
	defer t.atDisk(m)()
	if there, err := m.driver.there(m); err != nil {
		return err
	} else if there {
		if err := t.adopt(m); err != nil || !m.driver.volume {
			return err
		}
		return t.own(m) // it may be another mount than before
	}
	defer t.beginAgain(m)()
	if err := t.refuseToHide(m); err != nil {
		return err
	}
	t.volumes.Forget(m.mountPoint) // forget the mount that is gone
	was := t.disclaim(m)
	r := m.request
	r.options = m.optionsNow()
	did, err := m.driver.mount(ctx, &t.devices, r, m.origin())
	if err == nil {
		err = t.adopt(m) // fails if the mount is gone again
	}
	if err != nil {
		m.set(m.origin(), was)
	}
	t.saveOrLog()
	if err == nil && m.driver.volume {
		err = t.own(m)
	}
	if err != nil {
		return err
	}
	t.mu.Lock()
	m.made, m.found = m.made || did.made, false
	t.mu.Unlock()
	t.log.WithField("mountpoint", m.mountPoint).Warn("storage was not mounted any more, and is mounted again")
	return nil
}

// disclaim drops the identity of a storage's mount that is gone, and returns it. The next mount
// there becomes the storage's own, also if the agent ends before it has noted that mount. If there
// is no next mount, the caller sets the identity again: somebody else's mount is then compared.
func (t *Table) disclaim(m *mounted) (was mount.Identity) {
	was = m.mount()
	m.set(m.origin(), mount.Identity{})
	t.saveOrLog()
	return was
}

// beginAgain makes begins report that the storage is being mounted, until done is called. The
// storage is in the state file already.
func (t *Table) beginAgain(m *mounted) (done func()) {
	set := func(again bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		m.again = again
	}
	set(true)
	return func() { set(false) }
}

// begins reports whether a storage is being mounted.
func (t *Table) begins(m *mounted) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return m.again || t.intents[m.mountPoint] == m
}

// refuseToHide refuses to mount over a parent directory of another storage, because the users of
// that storage would find something else there. A mount that exists already and is only taken over
// is not refused for storages that are in sight. refuseToHide must run while begins reports true
// for this storage: of two calls that mount at the same time, one inside the other, one then sees
// the other.
func (t *Table) refuseToHide(m *mounted) error {
	if !m.driver.volume {
		return nil
	}
	at, err := mountsAt(m.mountPoint)
	if err != nil {
		return err
	}
	already := len(at) > 0 && m.isOf(m.origin(), at[len(at)-1])
	if !already {
		if err := t.refuseToHideStranger(m); err != nil {
			return err
		}
	}
	for _, inner := range t.known(m.contains) {
		there, err := inner.driver.there(inner)
		if err != nil {
			return err
		}
		if !already && (there || t.begins(inner)) {
			return errkind.New(errkind.FailedPrecondition, "storage %s: it would hide storage %s: request that one after it", m.mountPoint, inner.mountPoint)
		}
	}
	for _, outer := range t.known(func(o *mounted) bool { return o.driver.volume && o.contains(m) }) {
		if !t.begins(outer) {
			continue
		}
		if there, err := outer.driver.there(outer); err != nil {
			return err
		} else if !there {
			return errkind.New(errkind.FailedPrecondition, "storage %s: storage %s is being mounted, and would hide it: call again", m.mountPoint, outer.mountPoint)
		}
	}
	return nil
}
