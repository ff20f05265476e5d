package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
)

// CheckReleased refuses a device, named as in a Storage, that is in use in the guest: by a storage
// that is mounted or being mounted, whoever holds it, or by somebody else. A device that the guest
// does not have counts as released. CheckReleased changes nothing.
func (t *Table) CheckReleased(ctx context.Context, driverName, source string) error {
	driver := driverOf(driverName)
	if driver == nil || !driver.device {
		return errkind.New(errkind.InvalidArgument, "driver %.40q: want one whose storages have a device, of %v", driverName, DeviceDrivers())
	}
	now, cancel := context.WithCancel(ctx)
	cancel() // find must not wait for the device
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
		return errkind.New(errkind.DeadlineExceeded, "device %s: another call uses it: %w", from.path, err)
	}
	defer done()
	disk, err := claim(from.path)
	switch {
	case err == nil:
		return disk.Close()
	case errors.Is(err, unix.EBUSY):
		return errkind.New(errkind.FailedPrecondition, "device %s is in use in the guest%s: end that and try again: %w", from.path, users(from.device.Number), err)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return nil // the device has just gone
	default:
		return fmt.Errorf("device %s may still be in use: %w", from.path, err)
	}
}

// refuseHeld refuses storages that are mounted or being mounted, and names their holders. A storage
// that somebody else has unmounted uses no device. A storage of ours may be mounted again until the
// call that has its turn ends.
func (t *Table) refuseHeld(ctx context.Context, matches func(*mounted) bool) error {
	for _, m := range t.known(matches) {
		refuse := func() error {
			t.mu.Lock()
			defer t.mu.Unlock()
			return errkind.New(errkind.FailedPrecondition, "volume %s is held in the guest by %s: remove them first", m.mountPoint, holderNames(m.heldOrNeeded()))
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

func holderNames(holders []string) string {
	names := make([]string, len(holders))
	for i, holder := range holders {
		if names[i] = "container " + holder; holder == Sandbox {
			names[i] = "the sandbox"
		}
	}
	return strings.Join(names, ", ")
}

// proveFree refuses a device that is still in use after its storage was unmounted: by another mount
// namespace, or by a device stacked on it. Another storage in the table with the same device is not
// counted, nor is a stranger that leaves together with it.
func (t *Table) proveFree(m *mounted) error {
	if !m.driver.device {
		return nil
	}
	if t.isElsewhere(m) || t.leavesWithStranger(m) {
		return nil
	}
	disk, err := claim(m.origin().path)
	switch {
	case err == nil:
		return disk.Close()
	case !isDevice(m.origin()), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return nil // the device is gone, or another one has its name
	case errors.Is(err, unix.EBUSY):
		return stillInUse(m.mountPoint, m.origin().path, m.origin().device.Number, err)
	default:
		return fmt.Errorf("volume %s is unmounted, but its device may still be in use: %w", m.mountPoint, err)
	}
}

func stillInUse(mountPoint, path string, number uint64, err error) error {
	return errkind.New(errkind.FailedPrecondition, "volume %s is unmounted, but its device %s is still in use in the guest%s: end that and try again: %w", mountPoint, path, users(number), err)
}

// isElsewhere reports whether another storage in the table has the same device and is mounted.
func (t *Table) isElsewhere(m *mounted) bool {
	t.mu.Lock()
	var others []*mounted
	for _, other := range t.mounts {
		if other != m && other.origin().same(m.origin()) {
			others = append(others, other)
		}
	}
	t.mu.Unlock()
	return slices.ContainsFunc(others, func(other *mounted) bool {
		there, _ := other.driver.there(other)
		return there
	})
}

// isDevice reports whether an origin's node still belongs to that device.
func isDevice(from origin) bool {
	number, err := blockdev.NumberOf(from.path)
	return err == nil && from.device.Same(mount.Device{Number: number, Seq: blockdev.SeqOf("/", number)})
}

// maxUsers is how many users of a device are named.
const maxUsers = 3

// users lists, in brackets, the users of a device that can be found: other mounts of it, processes
// in other mount namespaces that have it mounted, and devices stacked on it. It returns "" if none
// is found.
func users(number uint64) string {
	var found []string
	above, _ := os.ReadDir(fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(number), unix.Minor(number)))
	for _, device := range above {
		found = append(found, device.Name())
	}
	for _, place := range mount.Places(number) {
		found = append(found, "mounted at "+place)
	}
	found = append(found, mount.Elsewhere(number)...)
	if len(found) == 0 {
		return ""
	}
	return " (" + strings.Join(found[:min(len(found), maxUsers)], ", ") + ")"
}
