package health

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/fanotify"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/xfsmonitor"
)

// Errors makes a watch look at once when its filesystem reports an error (FAN_FS_ERROR), until ctx
// ends. An error says that something has failed, and not whether the filesystem still works: the
// examination that follows decides on the conditions.
func (m *Monitor) Errors(ctx context.Context) error {
	group, err := fanotify.Open()
	if err != nil {
		return fmt.Errorf("health: errors of filesystems are not reported by the kernel: %w", err)
	}
	defer group.Close()
	m.errors.Store(group)
	defer m.errors.Store(nil)
	for _, w := range m.all() {
		w.poke() // the next look adds its filesystem
	}
	err = group.Follow(ctx, func(e fanotify.Event) {
		for _, w := range m.all() {
			w.reported(e)
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("health: errors of filesystems are no longer reported by the kernel: %w", err)
}

// join adds the filesystem to the monitor's group, once. The group does not hold a filesystem, so
// somebody else's is added, too. A path that leads to another mount for a moment adds that one's
// filesystem, whose errors then cause an examination in vain.
func (w *Watch) join() {
	group := w.monitor.errors.Load()
	w.mu.Lock()
	joined := group == w.group
	w.mu.Unlock()
	if joined || group == nil || !inSight(w.target) {
		return
	}
	if mark, err := mount.Look(w.target.Mountpoint); err != nil || !w.target.Mount.Bears(mark) {
		return
	}
	fsid, err := group.Add(w.target.Mountpoint)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EIO) {
		return // it was unmounted, or has shut down
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.group, w.fsid = group, fsid // zero if the kernel or the filesystem reports no errors
}

// monitorXFS opens the health monitor of an owned xfs, once. A mount of somebody else is left
// alone: its root directory would be open for a moment. The goroutine that reads the events ends
// when the filesystem is unmounted.
func (w *Watch) monitorXFS() {
	w.mu.Lock()
	tried := w.monitored
	w.mu.Unlock()
	if tried || !w.owned.Load() || !inSight(w.target) {
		return
	}
	root, err := os.Open(w.target.Mountpoint)
	if err != nil {
		return // the examination says why
	}
	defer root.Close()
	if sameMount(root, w.target) != nil {
		return
	}
	monitor, err := xfsmonitor.Open(root)
	w.mu.Lock()
	w.monitored = true
	w.mu.Unlock()
	if err != nil {
		if !errors.Is(err, xfsmonitor.ErrUnsupported) {
			w.monitor.log.Warnf("health: %v", err)
		}
		return
	}
	w.mu.Lock()
	w.xfs = monitor
	w.mu.Unlock()
	go func() {
		defer monitor.Close()
		if err := monitor.Follow(w.monitorSaid); err != nil {
			w.monitor.log.Warnf("health: %v", err)
		}
	}()
}

// endMonitor closes the health monitor, if there is one. The next look may open another one.
func (w *Watch) endMonitor() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.xfs != nil {
		w.xfs.Close() // again, if the filesystem was unmounted
		w.xfs, w.monitored = nil, false
	}
}

// monitorSaid processes an event of an xfs's health monitor. None of them says whether the
// filesystem still works: the examination that follows does.
func (w *Watch) monitorSaid(e xfsmonitor.Event) {
	if e.Type == xfsmonitor.Running {
		return
	}
	w.mu.Lock()
	w.event = "its health monitor says: " + e.String()
	w.mu.Unlock()
	w.hurry()
}

// reported processes an event of the monitor's group.
func (w *Watch) reported(e fanotify.Event) {
	w.mu.Lock()
	mine := !e.Lost && w.fsid == e.Filesystem && w.fsid != unix.Fsid{}
	if mine {
		w.event = fmt.Sprintf("the kernel reported %d errors, the first %q", e.Count, e.Errno.Error())
	}
	w.mu.Unlock()
	if mine || e.Lost {
		w.hurry()
	}
}

// Mounts makes a watch look at once when its mount has changed, is gone or is covered, until ctx
// ends. changes is followed by the caller. The kernel announces what somebody does to a mount, and
// not that a filesystem has stopped itself.
func (m *Monitor) Mounts(ctx context.Context, changes *mount.Changes) {
	next := changes.Next()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next:
		}
		next = changes.Next() // before the look, so that no change is missed
		watches := m.all()
		if len(watches) == 0 {
			continue
		}
		mounts, err := mount.Now()
		if err != nil {
			continue // the next change may be seen
		}
		for _, w := range watches {
			if id := w.target.Mount.ID; id != 0 {
				w.mountSeen(mounts.Seen(id))
			}
		}
	}
}

// MountOptions returns the options of a mount and its filesystem, to be compared; never "".
func MountOptions(m *mount.Info) string { return m.Options + " " + m.VFSOptions }

// mountSeen is mountedAs for the mount, or nil if it is not in sight. Most mounts have not changed
// since the last time, and mount.Now returns the same Info then.
func (w *Watch) mountSeen(now *mount.Info) {
	w.mu.Lock()
	same := now != nil && now == w.seen
	w.seen = now
	w.mu.Unlock()
	switch {
	case same:
	case now == nil:
		w.mountedAs("")
	default:
		w.mountedAs(MountOptions(now))
	}
}

// mountedAs compares the mount's options with those of the last time. They are "" if the mount is
// not in sight.
func (w *Watch) mountedAs(options string) {
	w.mu.Lock()
	changed := options != w.options && (options == "" || w.options != "")
	w.options = options
	w.mu.Unlock()
	if changed {
		w.hurry()
		deliver(w.moved)
	}
}
