package storage

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
)

// stranger is a mount that this agent has not made and whose holder is not known: from the state of
// another version, or from a state file that cannot be read. While the mount exists, the removal of
// a container that may hold it does not answer OK, because the host would then remove its disk. A
// request for a storage at the same mount point takes the mount over, with its holders.
type stranger struct {
	mountPoint string
	holders    []string     // the possible holders; empty means any
	record     record       // as it was read, written back for the next agent
	leaving    []*departure // as long as one has not ended for it, the mount may be in use or come back although mountinfo does not show it

	disks []mount.Device // the disks that a destroy has unmounted; one may still be in use elsewhere
}

// storageRoot is the directory below which all known hosts mount storages.
const storageRoot = "/run/kata-containers/"

// strangersOf returns the mounts below storageRoot, for a state file that cannot be read.
func strangersOf(all []*mount.Info) (found []stranger) {
	for _, m := range all {
		if strings.HasPrefix(m.Mountpoint, storageRoot) && mount.OnDisk(m) { // removing a mount without a disk loses nothing
			found = append(found, stranger{mountPoint: m.Mountpoint, record: record{MountPoint: m.Mountpoint, Device: m.Source, FSType: m.FSType}})
		}
	}
	return found
}

// mayHold reports whether holder may hold the mount.
func (s stranger) mayHold(holder string) bool {
	return len(s.holders) == 0 || slices.Contains(s.holders, holder)
}

// strangerHolders returns the holders of the stranger at a mount point, if there is a stranger.
func (t *Table) strangerHolders(ctx context.Context, mountPoint string) (map[string]bool, error) {
	left, err := t.remaining(ctx, func(s stranger) bool { return s.mountPoint == mountPoint })
	holders := map[string]bool{}
	for _, s := range left {
		for _, holder := range s.holders {
			holders[holder] = true
		}
	}
	return holders, err
}

// strangersThat returns the strangers that match.
func (t *Table) strangersThat(match func(stranger) bool) []stranger {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.strangers), func(s stranger) bool { return !match(s) })
}

// remaining returns the strangers that match and are still mounted, and forgets the matching ones
// that are not. Until ctx ends, it waits for calls that are at a disk which a stranger was on.
func (t *Table) remaining(ctx context.Context, match func(stranger) bool) ([]stranger, error) {
	var errs []error
	gone := map[string]bool{}
	for _, s := range t.strangersThat(match) {
		mounts, err := mountsAt(s.mountPoint)
		if err == nil && len(mounts) == 0 && len(s.leaving) == 0 {
			gone[s.mountPoint], err = t.devices.free(ctx, s.disks)
		}
		errs = append(errs, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.strangers = slices.DeleteFunc(t.strangers, func(s stranger) bool {
		m := t.mounts[s.mountPoint]
		return gone[s.mountPoint] && len(s.leaving) == 0 || m != nil && len(m.holders) > 0
	})
	return slices.DeleteFunc(slices.Clone(t.strangers), func(s stranger) bool { return !match(s) }), errors.Join(errs...)
}

// refuseStrangers returns an error if holder may hold a mount that this agent does not know.
func (t *Table) refuseStrangers(ctx context.Context, holder string) error {
	left, err := t.remaining(ctx, func(s stranger) bool { return s.mayHold(holder) })
	if err != nil {
		return err
	}
	for _, s := range left {
		return errkind.New(errkind.FailedPrecondition, "storage %s is mounted, but this agent's state does not say who holds it: request it again, or destroy the sandbox", s.mountPoint)
	}
	return nil
}

// foreign is the driver of a stranger while ReleaseAll unmounts it together with all storages.
var foreign = &driver{
	name: "foreign", volume: true,
	mount: func(_ context.Context, _ *devices, r request, _ origin) (did, error) {
		return did{}, errkind.New(errkind.FailedPrecondition, "storage %s is unmounted, and cannot be mounted again: its options are unknown", r.mountPoint)
	},
	unmount: func(m *mounted) error { // unmounts the topmost mount
		if there, err := m.driver.there(m); !there || err != nil {
			return err
		}
		if err := mount.Unmount(m.mountPoint); err != nil {
			return inUse(m.mountPoint, err)
		}
		return nil
	},
	couldGo: couldUnmount,
	there: func(m *mounted) (bool, error) {
		mounts, err := mountsAt(m.mountPoint)
		return len(mounts) > 0, err
	},
}

// leavers returns the strangers as storages that nobody holds, one per mount point.
func (t *Table) leavers(ctx context.Context) (all []*mounted, err error) {
	left, err := t.remaining(ctx, func(stranger) bool { return true })
	seen := map[string]bool{}
	for _, s := range left {
		if seen[s.mountPoint] {
			continue
		}
		seen[s.mountPoint] = true
		all = append(all, &mounted{request: request{driver: foreign, mountPoint: s.mountPoint}})
	}
	return all, err
}

// setLeaving notes whether a departure is at the strangers at a mount point. Another departure may
// be at them at the same time, if their disk hangs.
func (t *Table) setLeaving(mountPoint string, d *departure, leaving bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.strangers {
		s := &t.strangers[i]
		if s.mountPoint != mountPoint {
			continue
		}
		s.leaving = slices.DeleteFunc(slices.Clone(s.leaving), func(other *departure) bool { return other == d })
		if leaving {
			s.leaving = append(s.leaving, d)
		}
	}
}

// leavesWithStranger reports whether a stranger on a storage's disk is unmounted by the same
// departure as the storage. If so, the departure proves the disk free after all have gone. An
// earlier departure that is still at the stranger proves nothing any more.
func (t *Table) leavesWithStranger(m *mounted) bool {
	disk := m.origin().device
	together := t.strangersThat(func(s stranger) bool { return slices.Contains(s.leaving, m.departure) })
	return slices.ContainsFunc(together, func(s stranger) bool {
		if slices.ContainsFunc(s.disks, disk.Same) {
			return true
		}
		mounts, _ := mountsAt(s.mountPoint)
		return slices.ContainsFunc(mounts, func(at *mount.Info) bool {
			return slices.ContainsFunc(mount.Identify(at).Devices, disk.Same)
		})
	})
}

// refuseToHideStranger refuses to mount over a parent directory of a stranger, because nobody could
// unmount the stranger then. A stranger that the storage's own departure has unmounted is mounted
// again after the storage.
func (t *Table) refuseToHideStranger(m *mounted) error {
	for _, s := range t.strangersThat(func(s stranger) bool { return strings.HasPrefix(s.mountPoint, m.mountPoint+"/") }) {
		mounts, err := mountsAt(s.mountPoint)
		if err != nil {
			return err
		}
		comesBack := len(s.leaving) > 0 && !slices.Contains(s.leaving, m.departure)
		if len(mounts) > 0 || comesBack {
			return errkind.New(errkind.FailedPrecondition, "storage %s: it would hide the mount at %s, whose holder is unknown: unmount that, or destroy the sandbox", m.mountPoint, s.mountPoint)
		}
	}
	return nil
}

// noteDisks records the disks of a stranger's topmost mount, in addition to those of the mounts
// above it. The stranger is remembered until these disks are free, and the departure checks them.
func (t *Table) noteDisks(one *departing) {
	if one.driver != foreign {
		return
	}
	var own, guests []mount.Device
	if top, _ := mount.Topmost(one.mountPoint); top != nil {
		own = mount.Identify(top).Devices
	}
	if root, _ := mount.Topmost("/"); root != nil {
		guests = mount.Identify(root).Devices // in use for as long as the guest runs
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.strangers {
		if s := &t.strangers[i]; s.mountPoint == one.mountPoint {
			s.disks = append(slices.Clone(s.disks), slices.DeleteFunc(slices.Clone(own), func(d mount.Device) bool {
				return slices.ContainsFunc(guests, d.Same) || slices.Contains(s.disks, d)
			})...)
			one.disks = s.disks
		}
	}
}

// free reports whether none of the disks that a stranger was on is in use, and each one's state is
// known.
func (d *devices) free(ctx context.Context, disks []mount.Device) (bool, error) {
	for _, disk := range disks {
		if _, err := d.inUseStill(ctx, disk); errkind.Of(err) == errkind.DeadlineExceeded {
			return false, err
		} else if err != nil {
			return false, nil
		}
	}
	return true, nil
}

// inUseStill returns a disk's path, and an error if the disk is in use or its state is not known. A
// disk that is gone counts as unused. inUseStill waits until ctx ends for calls that are at the
// disk: they claim it, or would find it claimed.
func (d *devices) inUseStill(ctx context.Context, disk mount.Device) (path string, err error) {
	device, err := blockdev.ByNumber(disk.Number)
	if err != nil || !disk.Same(mount.Device{Number: device.Number, Seq: device.Seq}) {
		return "", nil
	}
	done, err := d.turns.Take(ctx, device.Path)
	if err != nil {
		return device.Path, errkind.New(errkind.DeadlineExceeded, "device %s may still be in use, another call uses it: %w", device.Path, err)
	}
	defer done()
	claimed, err := claim(device.Path)
	switch {
	case err == nil:
		return device.Path, claimed.Close()
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return "", nil
	default:
		return device.Path, err
	}
}
