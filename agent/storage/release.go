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

// Release lets go of everything that holder holds, the last mounted first, and
// unmounts what nobody holds any more. What is still in use stays held, and is
// named in the error; Release may be repeated.
func (t *Table) Release(ctx context.Context, holder string) error {
	err := t.each(t.heldBy(func(m *mounted) bool { return m.holders[holder] }), func(m *mounted) error {
		return t.release(ctx, holder, m.mountPoint)
	})
	return errors.Join(err, t.refuseStrangers(holder))
}

// release has a holder let go of a storage.
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
		err := t.save() // or the next agent would have the holder again, whom nobody removes any more
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

// couldUnmount is couldGo of what is mounted.
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

// inUse is the answer where umount(2) has said that a mount is busy: another one is within it,
// or a process uses it.
func inUse(mountPoint string, err error) error {
	all, _ := mount.All()
	for _, m := range all {
		if strings.HasPrefix(m.Mountpoint, mountPoint+"/") {
			return errkind.New(errkind.FailedPrecondition, "volume %s is in use: %s (%s) is mounted within it, at %s: unmount that and try again: %w", mountPoint, m.Source, m.FSType, m.Mountpoint, err)
		}
	}
	return errkind.New(errkind.FailedPrecondition, "volume %s is in use by a process in the guest: end it and try again: %w", mountPoint, err)
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
			return errkind.New(errkind.DeadlineExceeded, "unmount %s: another call is at its device %s: %w", m.mountPoint, m.origin().path, err)
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
		return errkind.New(errkind.Of(err), "it stays mounted: %w", err)
	}
	return nil
}
