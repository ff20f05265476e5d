package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/refusal"
)

// CheckReleased refuses a device, named as a Storage names it, that anything in the guest
// uses: a storage of it that is mounted or being mounted, whoever holds it, or somebody
// else. A device that the guest does not have is released. It changes nothing.
func (t *Table) CheckReleased(ctx context.Context, driverName, source string) error {
	driver := driverOf(driverName)
	if driver == nil || !driver.device {
		return refusal.New(refusal.InvalidArgument, "driver %.40q: want one whose storages have a device, of %v", driverName, DeviceDrivers())
	}
	now, cancel := context.WithCancel(ctx)
	cancel() // it is there, or it is not
	from, err := driver.find(now, request{driver: driver, source: source})
	missing := errors.Is(err, context.Canceled) || errors.Is(err, fs.ErrNotExist)
	if err != nil && !missing {
		return err
	}
	if err := t.refuseHeld(ctx, func(m *mounted) bool {
		return m.driver == driver && m.source == source || err == nil && m.origin().same(from)
	}); err != nil || missing {
		return err
	}
	done, err := t.devices.turns.Take(ctx, from.path)
	if err != nil {
		return refusal.New(refusal.DeadlineExceeded, "device %s: another call is at it: %w", from.path, err)
	}
	defer done()
	disk, err := claim(from.path)
	switch {
	case err == nil:
		return disk.Close()
	case errors.Is(err, unix.EBUSY):
		return refusal.New(refusal.FailedPrecondition, "device %s is in use in the guest%s: end that and try again: %w", from.path, users(from.device.Number), err)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return nil // it has just gone
	default:
		return fmt.Errorf("whether device %s is free is not known: %w", from.path, err)
	}
}

// refuseHeld refuses storages that are mounted, or being mounted, and names who has them.
// One that somebody else has unmounted uses no device; one that we have may be mounted
// again, until the call that has its turn ends.
func (t *Table) refuseHeld(ctx context.Context, matches func(*mounted) bool) error {
	for _, m := range t.known(matches) {
		refuse := func() error {
			t.mu.Lock()
			defer t.mu.Unlock()
			return refusal.New(refusal.FailedPrecondition, "volume %s is held in the guest by %s: remove them first", m.mountPoint, holderNames(m.heldOrNeeded()))
		}
		if t.begins(m) {
			return refuse()
		}
		err := t.inTurn(ctx, "look at", m.mountPoint, func() error {
			if there, err := m.driver.there(m); !there || err != nil {
				return err
			}
			return refuse()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// known returns storages that are mounted, or being mounted, in no order.
func (t *Table) known(matches func(*mounted) bool) []*mounted {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := slices.AppendSeq(slices.Collect(maps.Values(t.mounts)), maps.Values(t.intents))
	return slices.DeleteFunc(all, func(m *mounted) bool { return !matches(m) })
}

// begins reports whether a storage is being mounted.
func (t *Table) begins(m *mounted) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return m.again || t.intents[m.mountPoint] == m
}

func holderNames(holders []string) string {
	names := make([]string, len(holders))
	for i, holder := range holders {
		if names[i] = "container " + holder; holder == Sandbox {
			names[i] = "the sandbox"
		}
	}
	return strings.Join(names, ", ")
}
