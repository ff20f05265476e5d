package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
)

// isThere tells whether a storage that was written down is there still, by what
// the kernel says.
func (m *mounted) isThere() (bool, error) {
	there, err := m.driver.there(m)
	if there {
		return true, nil // be it covered: that is for whoever uses it
	}
	return false, err
}

// Recover takes over what the agent before this one has left: what its state
// names and mountinfo has. It goes before any call. A state that makes no sense is
// kept beside itself for people to read, and mountinfo is the truth then: what it held
// is a stranger's until it is asked for again.
func (t *Table) Recover() error {
	if t.state == nil {
		return nil
	}
	var was snapshot
	found, err := t.state.Read(&was)
	if !found {
		was = snapshot{}
	}
	var errs []error
	if err != nil {
		mounts, listErr := mount.All()
		errs = append(errs, err, listErr)
		t.strangers = strangersOf(mounts)
	}
	t.past = snapshot{Header: was.Header, more: was.more}
	filesystem.EndLaptopMode()
	for _, r := range was.Storages {
		if err := t.recover(r); err != nil {
			errs = append(errs, err)
			if mount.IsPoint(r.MountPoint) {
				t.strangers = append(t.strangers, stranger{mountPoint: r.MountPoint, holders: r.Holders, record: r})
			}
		}
	}
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if len(errs) > 0 {
		aside, err := t.state.Aside()
		errs = append([]error{fmt.Errorf("state %s, kept as %s: what follows is not known, and no container that may have it is removed before it is asked for again", t.state.Path(), aside)}, errs...)
		if err != nil {
			errs = append(errs, err)
		}
	}
	t.volumes.HearFrom(was.Heard)
	t.mu.Lock()
	t.ended = was.Destroyed
	t.mu.Unlock()
	return errors.Join(append(errs, t.save())...)
}

func (t *Table) recover(r record) error {
	m, err := r.mounted()
	if err != nil {
		return err
	}
	there, err := m.isThere()
	if err != nil {
		return err
	}
	entry := t.log.WithFields(logrus.Fields{"mountpoint": m.mountPoint, "device": m.origin().path, "holders": r.Holders})
	if !there && t.proveFree(m) != nil {
		entry.Warn("storage is unmounted, and its device is still in use: its holders keep it")
		t.mu.Lock()
		t.mounts[m.mountPoint] = m
		t.mu.Unlock()
		return nil
	}
	if !there {
		if m.made {
			os.Remove(m.mountPoint)
		}
		entry.Info("storage is not there any more")
		return nil
	}
	t.mu.Lock()
	t.mounts[m.mountPoint] = m
	t.mu.Unlock()
	entry.Info("storage taken over")
	if err := t.adopt(m); err != nil {
		return err
	}
	if !m.driver.device {
		return nil // nothing watches it, and its root may hang
	}
	if err := t.volumes.Own(m.mountPoint, r.identity(), r.Past); err != nil {
		return fmt.Errorf("watch %s: %w", m.mountPoint, err)
	}
	return nil
}

// Follow saves whenever changed delivers, until ctx ends.
func (t *Table) Follow(ctx context.Context, changed <-chan struct{}) {
	for {
		select {
		case <-changed:
			if err := t.save(); err != nil && !errors.Is(err, fs.ErrClosed) { // the agent ends
				t.log.Error(err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// save writes down everything as it is now.
func (t *Table) save() error {
	if t.state == nil {
		return nil
	}
	return t.state.Save(func() any { return t.snapshot() })
}

// saveOrLog is save where nothing hangs on it: an agent after this one finds what
// was not struck out unmounted, or held by a container that is removed again.
func (t *Table) saveOrLog() {
	if err := t.save(); err != nil {
		t.log.Error(err)
	}
}
