package storage

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
)

// Release releases everything that holder holds, the nested mounts first, and unmounts the storages
// that nobody else holds. A storage that is still in use stays held and is named in the error.
// Release may be repeated.
func (t *Table) Release(ctx context.Context, holder string) error {
	err := t.each(t.heldBy(func(m *mounted) bool { return m.holders[holder] }), func(m *mounted) error {
		return t.release(ctx, holder, m.mountPoint)
	})
	return errors.Join(err, t.refuseStrangers(ctx, holder))
}

// release releases one storage for a holder.
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
		err := t.save() // otherwise the next agent would restore this holder, and no call would remove it
		if err != nil {
			t.mu.Lock()
			m.holders[holder] = true
			t.mu.Unlock()
		}
		return err
	})
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

// couldUnmount is the couldGo function of drivers that mount.
func couldUnmount(ctx context.Context, t *Table, m *mounted, nested bool) error {
	there, err := m.driver.there(m)
	if err != nil || !there {
		return err
	}
	if err := t.flush(ctx, m); err != nil || nested {
		return err
	}
	return t.volumes.Quiet(ctx, m.mountPoint, func() (gone bool, err error) {
		if err = mount.Idle(m.mountPoint); errors.Is(err, unix.EBUSY) {
			err = inUse(m.mountPoint, err)
		}
		return false, err
	})
}

// inUse returns the error after umount(2) has reported that a mount is busy: another mount is
// within it, or a process uses it.
func inUse(mountPoint string, err error) error {
	all, _ := mount.All()
	for _, m := range all {
		if strings.HasPrefix(m.Mountpoint, mountPoint+"/") {
			return errkind.New(errkind.FailedPrecondition, "volume %s is in use: %s (%s) is mounted within it, at %s: unmount that and try again: %w", mountPoint, m.Source, m.FSType, m.Mountpoint, err)
		}
	}
	return errkind.New(errkind.FailedPrecondition, "volume %s is in use by a process in the guest: end it and try again: %w", mountPoint, err)
}

// unmount unmounts a storage, removes the mount point that was made for it, and proves that its
// device is free. It may be repeated after a failure, and continues from there.
func (t *Table) unmount(ctx context.Context, m *mounted) error {
	defer t.atDisk(m)()
	if err := t.flush(ctx, m); err != nil {
		return err
	}
	if m.driver.device { // otherwise two proofs, or a proof and a mount, would collide on the exclusive claim
		done, err := t.devices.turns.Take(ctx, m.origin().path)
		if err != nil {
			return errkind.New(errkind.DeadlineExceeded, "unmount %s: another call uses its device %s: %w", m.mountPoint, m.origin().path, err)
		}
		defer done()
	}
	err := t.volumes.Quiet(ctx, m.mountPoint, func() (gone bool, err error) {
		if err := m.driver.unmount(m); err != nil {
			return false, err
		}
		return true, t.proveFree(m)
	})
	if err != nil {
		return err
	}
	if m.driver.volume && m.made {
		// Only after the unmount: when a directory is removed, the kernel also detaches the mounts
		// on it in other namespaces (detach_mounts in vfs_rmdir), from under their users.
		os.Remove(m.mountPoint) // fails if the directory is not empty, as intended
	}
	t.log.WithFields(logrus.Fields{"mountpoint": m.mountPoint, "device": m.origin().path}).Info("storage unmounted")
	return nil
}

// flush thaws a volume that a lease has frozen, and waits until the disk has taken all earlier
// writes and answers, and the filesystem has written its log back. umount(2) takes the mount out of
// the tree before it writes: on a disk that hangs, the volume would be out of sight and still be
// written to.
func (t *Table) flush(ctx context.Context, m *mounted) error {
	if !m.driver.volume || m.fstype == "tmpfs" { // a tmpfs has no disk
		return nil
	}
	if there, err := m.driver.there(m); err != nil || !there {
		return err
	}
	err := t.volumes.Unfreeze(ctx, m.mountPoint)
	if err == nil {
		err = t.volumes.Settle(ctx, m.mountPoint, func(failed error) {
			t.log.WithFields(logrus.Fields{"mountpoint": m.mountPoint, "device": m.origin().path}).WithError(failed).Warn("the disk has not taken all that is in the filesystem's log: the next mount replays it")
		})
	}
	if err != nil {
		return errkind.New(errkind.Of(err), "it stays mounted: %w", err)
	}
	return nil
}
