package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/refusal"
)

// ReleaseAll lets go of every storage, whoever holds it, and takes none until
// End(false). Where one cannot go, or agreed, asked once at the end, says no, all
// stay, and those that are gone by then are mounted again. No other call may be under
// way.
func (t *Table) ReleaseAll(ctx context.Context, agreed func() bool) error {
	all := t.nestedFirst()
	if err := each(all, func(m *mounted) error { return t.couldGo(ctx, m, all) }); err != nil {
		return err
	}
	err := each(all, func(m *mounted) error {
		return t.inTurn(ctx, "unmount", m.mountPoint, func() error { return t.unmount(ctx, m) })
	})
	if err == nil {
		err = t.unmountStrangers()
	}
	if err == nil {
		err = t.endEmpty(agreed)
	}
	if err == nil {
		return nil
	}
	for _, m := range slices.Backward(all) {
		err = errors.Join(err, t.inTurn(context.Background(), "mount", m.mountPoint, func() error { return t.mountAgain(m) }))
	}
	return err
}

// endEmpty writes down that the sandbox is destroyed and nothing is held, or leaves
// what is held as it was.
func (t *Table) endEmpty(agreed func() bool) error {
	t.mu.Lock()
	were := t.mounts
	t.mounts = map[string]*mounted{}
	t.mu.Unlock()
	err := t.End(true)
	if err == nil && agreed() {
		return nil
	}
	t.mu.Lock()
	t.mounts = were
	t.mu.Unlock()
	if err == nil {
		err = errors.Join(refusal.New(refusal.DeadlineExceeded, "the call has ended before everything was unmounted"), t.End(false))
	}
	return err
}

// nestedFirst returns all storages, those first that are mounted within others.
func (t *Table) nestedFirst() []*mounted {
	var all []*mounted
	for _, mountPoint := range t.heldBy(func(*mounted) bool { return true }) {
		all = append(all, t.at(mountPoint))
	}
	return all
}

// each does something with each of storages, with all at once but those within
// which others are mounted: a disk that hangs keeps nobody else.
func each(all []*mounted, do func(*mounted) error) error {
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, m := range all {
		if m.hasNested(all[:i]) {
			wait.Wait()
		}
		wait.Go(func() { errs[i] = do(m) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// hasNested reports whether one of others is mounted within m.
func (m *mounted) hasNested(others []*mounted) bool {
	return slices.ContainsFunc(others, func(o *mounted) bool { return strings.HasPrefix(o.mountPoint, m.mountPoint+"/") })
}

func (t *Table) couldGo(ctx context.Context, m *mounted, all []*mounted) error {
	if m.driver.couldGo == nil {
		return nil
	}
	return t.inTurn(ctx, "unmount", m.mountPoint, func() error { return m.driver.couldGo(ctx, t, m, m.hasNested(all)) })
}

// couldUnmount is couldGo of what is mounted.
func couldUnmount(ctx context.Context, t *Table, m *mounted, nested bool) error {
	there, err := m.stands()
	if err != nil || !there {
		return err
	}
	if err := m.flush(ctx); err != nil || nested {
		return err
	}
	return t.volumes.Quiet(ctx, m.mountPoint, func() error { return idle(m.mountPoint) })
}

// idle refuses a mount that somebody uses. The kernel tells that without unmounting:
// with MNT_EXPIRE umount(2) marks a mount that is not in use, and only unmounts it
// where it bears the mark already. Any use takes the mark away (mntput in
// fs/namespace.c), such as opening and closing its root.
func idle(mountPoint string) error {
	use := func() error {
		fd, err := unix.Open(mountPoint, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return &fs.PathError{Op: "open", Path: mountPoint, Err: err}
		}
		return unix.Close(fd)
	}
	if err := use(); err != nil {
		return err
	}
	err := unix.Unmount(mountPoint, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return use()
	case errors.Is(err, unix.EBUSY):
		return inUse(mountPoint, err)
	default: // nothing is mounted there any more, or something else is wrong: umount(2) will say it
		return nil
	}
}

func inUse(mountPoint string, err error) error {
	return refusal.New(refusal.FailedPrecondition, "volume %s is in use by a process in the guest: end it and try again: %w", mountPoint, err)
}

// unmount unmounts a storage, removes the mount point that was made for it, and
// proves its device free. It goes on where it was cut off, or failed in between.
func (t *Table) unmount(ctx context.Context, m *mounted) error {
	if err := m.flush(ctx); err != nil {
		return err
	}
	err := t.volumes.Unmount(ctx, m.mountPoint, func() error {
		if err := m.driver.unmount(m); err != nil {
			return err
		}
		return t.proveFree(m)
	})
	if err != nil {
		return err
	}
	if m.driver.volume && m.made {
		// Not before: with a directory the kernel also takes away what is mounted on it
		// in other namespaces (detach_mounts in vfs_rmdir), from under its users.
		os.Remove(m.mountPoint) // refused where it is not empty, which is right
	}
	t.log.WithFields(logrus.Fields{"mountpoint": m.mountPoint, "device": m.from.path}).Info("storage unmounted")
	return nil
}

// flush waits until the disk has what was written so far: umount(2) takes the mount
// out of the tree first and writes then, and on a disk that hangs the volume would be
// out of sight, and written to. However often it is called, one thread at most waits
// for a disk.
func (m *mounted) flush(ctx context.Context) error {
	if !m.driver.volume || m.fstype == "tmpfs" { // which has no disk
		return nil
	}
	if there, err := m.stands(); err != nil || !there {
		return err
	}
	if m.flushing == nil || isClosed(m.flushing) {
		done := make(chan struct{})
		m.flushing = done
		go func() {
			defer close(done)
			syncFS(m.mountPoint)
		}()
	}
	select {
	case <-m.flushing:
		return nil
	case <-ctx.Done():
		return refusal.New(refusal.DeadlineExceeded, "volume %s stays mounted: its disk does not take what was written: %w", m.mountPoint, ctx.Err())
	}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// syncFS is syncfs(2). What fails is for fsync's callers to know.
func syncFS(mountPoint string) {
	dir, err := os.Open(mountPoint)
	if err != nil {
		return
	}
	defer dir.Close()
	_ = unix.Syncfs(int(dir.Fd()))
}

// proveFree refuses a device that is still in use when it is mounted no more: in
// another mount namespace, or below another device. A storage of the same device
// elsewhere in the table is no such use.
func (t *Table) proveFree(m *mounted) error {
	if !m.driver.device || t.isElsewhere(m) {
		return nil
	}
	disk, err := claim(m.from.path)
	if errors.Is(err, unix.EBUSY) && isDevice(m.from) {
		return refusal.New(refusal.FailedPrecondition, "volume %s is unmounted, but its device %s is still in use in the guest%s: end that and try again: %w", m.mountPoint, m.from.path, users(m.from.number), err)
	}
	if err == nil {
		disk.Close()
	}
	return nil // what cannot be opened is gone
}

// isElsewhere reports whether another storage in the table has the same device, and is
// mounted.
func (t *Table) isElsewhere(m *mounted) bool {
	t.mu.Lock()
	var others []*mounted
	for _, other := range t.mounts {
		if other != m && other.from == m.from {
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
	var st unix.Stat_t
	return unix.Stat(from.path, &st) == nil && st.Rdev == from.number
}

// maxUsers is how many users of a device are named.
const maxUsers = 3

// users names, in brackets, who can be found to use a device: processes in other mount
// namespaces that have it mounted, and the devices above it; "" where nobody is.
func users(number uint64) string {
	var found []string
	above, _ := os.ReadDir(fmt.Sprintf("/sys/dev/block/%d:%d/holders", unix.Major(number), unix.Minor(number)))
	for _, device := range above {
		found = append(found, device.Name())
	}
	found = append(found, mountedBy(number)...)
	if len(found) == 0 {
		return ""
	}
	return " (" + strings.Join(found[:min(len(found), maxUsers)], ", ") + ")"
}

// mountedBy names a process of each mount namespace that has a device mounted.
func mountedBy(number uint64) (processes []string) {
	seen := map[string]bool{}
	device := fmt.Sprintf(" %d:%d ", unix.Major(number), unix.Minor(number))
	all, _ := os.ReadDir("/proc")
	for _, entry := range all {
		pid := entry.Name()
		namespace, err := os.Readlink("/proc/" + pid + "/ns/mnt")
		if err != nil || seen[namespace] {
			continue // no process, or known
		}
		seen[namespace] = true
		mounts, err := os.ReadFile("/proc/" + pid + "/mountinfo")
		if err != nil || !strings.Contains(string(mounts), device) {
			continue
		}
		name, _ := os.ReadFile("/proc/" + pid + "/comm")
		processes = append(processes, fmt.Sprintf("mounted where process %s runs, %.15q", pid, strings.TrimSpace(string(name))))
	}
	return processes
}
