package storage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/refusal"
)

// each does something with each of storages, which have nested ones first, and with all at
// once, but that each waits for those within it. A panic in it is an error.
func (t *Table) each(all []*mounted, do func(*mounted) error) error {
	errs, done := make([]error, len(all)), make([]chan struct{}, len(all))
	var wait sync.WaitGroup
	for i, m := range all {
		done[i] = make(chan struct{})
		wait.Go(func() {
			defer close(done[i])
			for j, other := range all[:i] {
				if m.hasNested([]*mounted{other}) {
					<-done[j]
				}
			}
			errs[i] = t.safely(m, do)
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}

// safely turns a panic into an error: nobody above a goroutine does.
func (t *Table) safely(m *mounted, do func(*mounted) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			t.log.Errorf("storage %s: panic: %v\n%s", m.mountPoint, p, debug.Stack())
			err = refusal.New(refusal.Internal, "storage %s: the agent has a bug, its log says more", m.mountPoint)
		}
	}()
	return do(m)
}

// hasNested reports whether one of others is mounted within m.
func (m *mounted) hasNested(others []*mounted) bool {
	return slices.ContainsFunc(others, func(o *mounted) bool { return strings.HasPrefix(o.mountPoint, m.mountPoint+"/") })
}

// nestedFirst orders storages so that those mounted within others come first.
func nestedFirst(all []*mounted) []*mounted {
	return slices.SortedFunc(slices.Values(all), func(a, b *mounted) int { return strings.Compare(b.mountPoint, a.mountPoint) })
}

func (t *Table) couldGo(ctx context.Context, m *mounted, all []*mounted) error {
	if m.driver.couldGo == nil {
		return nil
	}
	return t.inTurn(ctx, "unmount", m.mountPoint, func() error {
		defer t.atDisk(m)()
		return m.driver.couldGo(ctx, t, m, m.hasNested(all))
	})
}

// couldUnmount is couldGo of what is mounted.
func couldUnmount(ctx context.Context, t *Table, m *mounted, nested bool) error {
	there, err := m.driver.there(m)
	if err != nil || !there {
		return err
	}
	if err := t.flush(ctx, m); err != nil || nested {
		return err
	}
	return t.volumes.Quiet(ctx, m.mountPoint, func() error {
		err := mount.Idle(m.mountPoint)
		if errors.Is(err, unix.EBUSY) {
			err = inUse(m.mountPoint, err)
		}
		return err
	})
}

// inUse is the answer where umount(2) has said that a mount is busy: another one is within it,
// or a process uses it.
func inUse(mountPoint string, err error) error {
	all, _ := mount.All()
	for _, m := range all {
		if strings.HasPrefix(m.Mountpoint, mountPoint+"/") {
			return refusal.New(refusal.FailedPrecondition, "volume %s is in use: %s (%s) is mounted within it, at %s: unmount that and try again: %w", mountPoint, m.Source, m.FSType, m.Mountpoint, err)
		}
	}
	return refusal.New(refusal.FailedPrecondition, "volume %s is in use by a process in the guest: end it and try again: %w", mountPoint, err)
}

// unmount unmounts a storage, removes the mount point that was made for it, and
// proves its device free. It goes on where it was cut off, or failed in between.
func (t *Table) unmount(ctx context.Context, m *mounted) error {
	defer t.atDisk(m)()
	if err := t.flush(ctx, m); err != nil {
		return err
	}
	if m.driver.device { // or two proofs, or a mount, meet each other's claim of it
		done, err := t.devices.turns.Take(ctx, m.origin().path)
		if err != nil {
			return refusal.New(refusal.DeadlineExceeded, "unmount %s: another call is at its device %s: %w", m.mountPoint, m.origin().path, err)
		}
		defer done()
	}
	err := t.volumes.Unmount(ctx, m.mountPoint, func() (gone bool, err error) {
		if err := m.driver.unmount(m); err != nil {
			return false, err
		}
		return true, t.proveFree(m)
	})
	if err != nil {
		return err
	}
	if m.driver.volume && m.made {
		// Not before: with a directory the kernel also takes away what is mounted on it
		// in other namespaces (detach_mounts in vfs_rmdir), from under its users.
		os.Remove(m.mountPoint) // refused where it is not empty, which is right
	}
	t.log.WithFields(logrus.Fields{"mountpoint": m.mountPoint, "device": m.origin().path}).Info("storage unmounted")
	return nil
}

// flush waits until the disk has what was written so far, and answers: umount(2) takes
// the mount out of the tree first and writes then, and on a disk that hangs the volume
// would be out of sight, and written to.
func (t *Table) flush(ctx context.Context, m *mounted) error {
	if !m.driver.volume || m.fstype == "tmpfs" { // which has no disk
		return nil
	}
	if there, err := m.driver.there(m); err != nil || !there {
		return err
	}
	if err := t.volumes.Flush(ctx, m.mountPoint); err != nil {
		return refusal.New(refusal.KindOf(err), "it stays mounted: %w", err)
	}
	return nil
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// proveFree refuses a device that is still in use when it is mounted no more: in
// another mount namespace, or below another device. A storage of the same device elsewhere in
// the table is no such use, nor is a stranger that leaves with all others.
func (t *Table) proveFree(m *mounted) error {
	if !m.driver.device {
		return nil
	}
	if t.isElsewhere(m) || t.leavesWithStranger(m.origin().device) {
		return nil
	}
	disk, err := claim(m.origin().path)
	switch {
	case err == nil:
		return disk.Close()
	case !isDevice(m.origin()), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return nil // it is gone, or another one has its name
	case errors.Is(err, unix.EBUSY):
		return stillInUse(m.mountPoint, m.origin().path, m.origin().device.Number, err)
	default:
		return fmt.Errorf("volume %s is unmounted, but whether its device is free is not known: %w", m.mountPoint, err)
	}
}

func stillInUse(mountPoint, path string, number uint64, err error) error {
	return refusal.New(refusal.FailedPrecondition, "volume %s is unmounted, but its device %s is still in use in the guest%s: end that and try again: %w", mountPoint, path, users(number), err)
}

// isElsewhere reports whether another storage in the table has the same device, and is
// mounted.
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

// isDevice reports whether an origin's node is still that device's.
func isDevice(from origin) bool {
	number, err := blockdev.NumberOf(from.path)
	return err == nil && from.device.Same(mount.Device{Number: number, Seq: blockdev.SeqOf("/", number)})
}

// maxUsers is how many users of a device are named.
const maxUsers = 3

// users names, in brackets, who can be found to use a device: other mounts of it, processes
// in other mount namespaces that have it mounted, and the devices above it; "" where nobody is.
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
