package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
)

// isThere reports whether a storage from the state file is still mounted according to the kernel.
func (m *mounted) isThere() (bool, error) {
	there, err := m.driver.there(m)
	if there {
		return true, nil // even if it is covered: the calls that use it check that
	}
	return false, err
}

// Recover takes over the storages that the previous agent has left: those that are both in its
// state and in mountinfo. It must run before any call. An invalid state file is kept as a copy for
// people to read, and the agent relies on mountinfo alone: each storage is then a stranger until a
// call asks for it again.
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
		errs = append([]error{fmt.Errorf("state %s, kept as %s, is not understood in part; a container that may hold such a storage cannot be removed until the storage is requested again", t.state.Path(), aside)}, errs...)
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
		entry.Info("storage is not mounted any more")
		return nil
	}
	t.mu.Lock()
	t.mounts[m.mountPoint] = m
	t.mu.Unlock()
	err = t.adopt(m)
	refused := errkind.Of(err) == errkind.AlreadyExists
	switch {
	case refused: // by every call that needs it, too
		entry.Warn(err)
	case err != nil:
		return err
	default:
		entry.Info("storage taken over")
	}
	if !m.driver.device {
		return nil // no watch on it, and its root may hang
	}
	if refused {
		return t.volumes.Observe(m.mountPoint)
	}
	if err := t.volumes.Own(m.mountPoint, r.identity(), r.Past); err != nil {
		return fmt.Errorf("watch %s: %w", m.mountPoint, err)
	}
	return nil
}

// Follow saves the state each time changed delivers, until ctx ends.
func (t *Table) Follow(ctx context.Context, changed <-chan struct{}) {
	for {
		select {
		case <-changed:
			if err := t.save(); err != nil && !errors.Is(err, fs.ErrClosed) { // the agent is ending
				t.log.Error(err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// save writes the current state to the state file.
func (t *Table) save() error {
	if t.state == nil {
		return nil
	}
	return t.state.Save(func() any { return t.snapshot() })
}

// saveOrLog is save for changes that may be lost: the next agent would find a storage that is
// already unmounted, or one held by a container that will be removed again.
func (t *Table) saveOrLog() {
	if err := t.save(); err != nil {
		t.log.Error(err)
	}
}
