package storage

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/refusal"
)

// stranger is a mount that this agent has not made and cannot tell whose it is: of
// another version's state, or of one that cannot be read. While it is there no
// container that may have it is removed with OK, which would have the host pull its
// disk. A storage that is asked for at its mount point takes it over, with its holders.
type stranger struct {
	mountPoint string
	holders    []string // who may have it: everybody where there is nobody
	record     record   // as it was read, for the agent after this one
	leaving    bool     // umount(2) has not returned: it may be in use, and in no list of mounts
}

// storageRoot is where the hosts that we know have storages mounted.
const storageRoot = "/run/kata-containers/"

// strangersOf are the mounts below storageRoot, for a state that cannot be read.
func strangersOf(all []*mount.Info) (found []stranger) {
	for _, m := range all {
		if strings.HasPrefix(m.Mountpoint, storageRoot) && mount.OnDisk(m) { // of those without a disk nothing is lost
			found = append(found, stranger{mountPoint: m.Mountpoint, record: record{MountPoint: m.Mountpoint, Device: m.Source, FSType: m.FSType}})
		}
	}
	return found
}

// mayHold reports whether a holder may have the mount.
func (s stranger) mayHold(holder string) bool {
	return len(s.holders) == 0 || slices.Contains(s.holders, holder)
}

// strangerHolders are the holders of the stranger at a mount point, if it is one.
func (t *Table) strangerHolders(mountPoint string) (map[string]bool, error) {
	left, err := t.remaining()
	holders := map[string]bool{}
	for _, s := range left {
		for _, holder := range s.holders {
			if s.mountPoint == mountPoint {
				holders[holder] = true
			}
		}
	}
	return holders, err
}

// remaining returns the strangers that are still mounted, and forgets the others.
func (t *Table) remaining() ([]stranger, error) {
	t.mu.Lock()
	known := slices.Clone(t.strangers)
	t.mu.Unlock()
	var errs []error
	gone := map[string]bool{}
	for _, s := range known {
		mounts, err := mount.At(s.mountPoint)
		errs = append(errs, err)
		gone[s.mountPoint] = err == nil && len(mounts) == 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.strangers = slices.DeleteFunc(t.strangers, func(s stranger) bool {
		m := t.mounts[s.mountPoint]
		return gone[s.mountPoint] && !s.leaving || m != nil && len(m.holders) > 0
	})
	return slices.Clone(t.strangers), errors.Join(errs...)
}

// refuseStrangers is the answer to a holder who may have a mount that this agent does
// not know.
func (t *Table) refuseStrangers(holder string) error {
	left, err := t.remaining()
	if err != nil {
		return err
	}
	for _, s := range left {
		if s.mayHold(holder) {
			return refusal.New(refusal.FailedPrecondition, "storage %s is mounted, and was written down by another agent, or not: whose it is cannot be known: ask for it again, or destroy the sandbox", s.mountPoint)
		}
	}
	return nil
}

// strangersCouldGo refuses those that somebody uses, or whose disk does not answer.
func (t *Table) strangersCouldGo(ctx context.Context) error {
	left, err := t.remaining()
	errs := []error{err}
	for _, s := range left {
		if err := t.volumes.Flush(ctx, s.mountPoint); err != nil {
			return err
		}
		errs = append(errs, t.volumes.Quiet(ctx, s.mountPoint, func() error { return idle(s.mountPoint) }))
	}
	return errors.Join(errs...)
}

// unmountStrangers is for the sandbox's end: all that is mounted in it goes. It waits
// until ctx ends.
func (t *Table) unmountStrangers(ctx context.Context) error {
	left, err := t.remaining()
	errs := []error{err}
	for _, s := range slices.Backward(left) {
		errs = append(errs, t.unmountStranger(ctx, s))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	left, err = t.remaining()
	errs = []error{err}
	for _, s := range left {
		errs = append(errs, inUse(s.mountPoint, errStillThere))
	}
	return errors.Join(errs...)
}

// unmountStranger waits for the disk until ctx ends. A umount(2) that goes on behind that
// has taken the mount out of sight: it stays a stranger until its disk is free of it.
func (t *Table) unmountStranger(ctx context.Context, s stranger) error {
	err, ended := t.strangersLeave.Ask(ctx, s.mountPoint, func() error {
		t.setLeaving(s.mountPoint, true)
		defer t.setLeaving(s.mountPoint, false)
		return t.volumes.Unmount(ctx, s.mountPoint, func() (gone bool, err error) {
			if err := unmountAt(s.mountPoint, 0); err != nil {
				return false, inUse(s.mountPoint, err)
			}
			return true, nil
		})
	})
	if !ended {
		return refusal.New(refusal.DeadlineExceeded, "unmount %s: not done in time, its disk may not answer: %w", s.mountPoint, ctx.Err())
	}
	return err
}

func (t *Table) setLeaving(mountPoint string, leaving bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.strangers {
		if t.strangers[i].mountPoint == mountPoint {
			t.strangers[i].leaving = leaving
		}
	}
}

var errStillThere = errors.New("it is still mounted")
