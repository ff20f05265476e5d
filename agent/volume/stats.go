package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// Usage counts bytes or inodes of a volume.
type Usage struct {
	Total, Used, Available uint64
}

// Stats are a volume's usage and conditions.
type Stats struct {
	Bytes      Usage
	Inodes     Usage              // zero if the filesystem has no count of them, such as a btrfs
	Conditions []health.Condition // empty if the volume is healthy
	Unexamined bool               // nothing is known of its health, nor of Bytes more than the total: a block device without a mount
	at         time.Time
	fsid       unix.Fsid // identifies a tmpfs; on kernels before 6.8 nothing else does
}

// measureLimit is how long Stats waits for a filesystem before it answers with the last known
// values. Kata's clients give up after 2 s.
const measureLimit = time.Second

// measurement is a statfs in progress, shared by all callers: if the filesystem hangs, one thread
// waits for it, not one per call.
type measurement struct {
	began time.Time     // when a caller first waited for it
	done  chan struct{} // nil until a caller waits; closed when the measurement ends
	stats *Stats
	err   error
}

// Stats measures the volume at path as the kubelet does: Available excludes root's reserve, and
// Used does not count that reserve as used. For a filesystem that does not answer in time, Stats
// returns the last known values with a condition that says so.
func (t *Table) Stats(ctx context.Context, path string) (Stats, error) {
	if r, err := rawAt(ctx, path); err != nil || r != nil {
		if err != nil {
			return Stats{}, err
		}
		return r.stats()
	}
	v, err := t.Lookup(path)
	if err != nil {
		return Stats{}, err
	}
	return t.statsOf(ctx, v)
}

// statsOf is Stats of a volume that was mounted at its lookup.
func (t *Table) statsOf(ctx context.Context, v *Volume) (Stats, error) {
	stats, err := v.stats(ctx)
	if !errors.Is(err, errOtherMount) {
		return stats, err
	}
	// The volume was mounted again after Lookup.
	t.lost(v)
	if v, err = t.Lookup(v.Mountpoint); err != nil {
		return Stats{}, err
	}
	return v.stats(ctx)
}

func (v *Volume) stats(ctx context.Context) (Stats, error) {
	m, mine := v.begin()
	if mine {
		go v.measure(m)
	}
	early, cancel := deadline.Early(ctx)
	defer cancel()
	ctx, cancel = deadline.Awake(early, measureLimit)
	defer cancel()
	select {
	case <-m.done:
	case <-ctx.Done():
		select {
		case <-m.done: // it counts, however late this goroutine runs
		default:
			return v.remembered(time.Since(m.began))
		}
	}
	if m.err != nil {
		return Stats{}, m.err
	}
	stats := *m.stats
	if v.watch != nil {
		if look := v.watch.Asked(); look != nil {
			select {
			case <-look:
			case <-ctx.Done(): // the earlier conditions are still true, as far as is known
			}
		}
		var err error
		if stats.Conditions, err = v.watch.Conditions(ctx); err != nil {
			return Stats{}, errkind.New(errkind.DeadlineExceeded, "volume %s: %w: ask again", v.Mountpoint, err)
		}
	}
	return stats, nil
}

// StatsAtOnce is Stats if nothing has to be waited for; otherwise ok is false. It is for the
// goroutine that reads a connection. While FollowMounts runs and no mount changes, StatsAtOnce
// makes one system call. In that case it notices another mount in the volume's place only when the
// kernel has woken FollowMounts, but notices another filesystem there at once.
func (t *Table) StatsAtOnce(path string) (Stats, bool) {
	v := t.at(path)
	if v == nil {
		return Stats{}, false
	}
	conditions, ok := v.conditionsAtOnce()
	if !ok || v.watch != nil && v.watch.Asked() != nil {
		return Stats{}, false
	}
	m := v.beginAgain()
	if m == nil {
		return Stats{}, false
	}
	v.measure(m)
	if m.err != nil {
		return Stats{}, false
	}
	stats := *m.stats
	stats.Conditions = conditions
	return stats, true
}

// conditionsAtOnce returns the conditions of a known volume whose statfs does not block: a volume
// that is watched, or a tmpfs, which has no device that could fail. ok is false for virtio-fs, FUSE
// and NFS, which ask a server that may not answer, and for volumes whose path leads through such a
// filesystem.
func (v *Volume) conditionsAtOnce() ([]health.Condition, bool) {
	switch {
	case v.behind != "":
		return nil, false
	case v.watch == nil:
		return nil, v.FSType == "tmpfs"
	}
	return v.watch.Latest()
}

// beginAgain starts a measurement of a volume that was measured before, when its mount was checked:
// only the earlier measurement can tell its filesystem from another one. It returns nil if there is
// no earlier measurement, or if one is in progress.
func (v *Volume) beginAgain() *measurement {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.last == nil || v.measuring != nil {
		return nil
	}
	v.measuring = &measurement{}
	return v.measuring
}

// begin joins the measurement in progress, or makes one, which the caller must then measure. In
// both cases the caller waits for done.
func (v *Volume) begin() (m *measurement, mine bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if mine = v.measuring == nil; mine {
		v.measuring = &measurement{}
	}
	m = v.measuring
	if m.done == nil {
		m.began, m.done = time.Now(), make(chan struct{})
	}
	return m, mine
}

func (v *Volume) measure(m *measurement) {
	m.stats, m.err = statfs(v.Mountpoint)
	other := v.replaced(m.stats) // after statfs, so that a mount in between is noticed
	v.mu.Lock()
	defer v.mu.Unlock()
	if m.err == nil && (other || v.FSType == "tmpfs" && v.last != nil && m.stats.fsid != v.last.fsid) {
		m.err = fmt.Errorf("volume %s: %w", v.Mountpoint, errOtherMount)
	}
	if m.err == nil {
		v.last = m.stats
	}
	v.measuring = nil
	if m.done != nil {
		close(m.done)
	}
}

// isCurrent reports whether no mount has changed since the volume was last seen in its place.
func (v *Volume) isCurrent() bool {
	now := v.changes.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	return now != 0 && now == v.seen
}

// replaced reports whether the volume's path no longer leads to the volume. It checks the path if a
// mount has changed, and if statfs returns another filesystem ID than last time, which means that
// something was mounted or unmounted just now. If the path cannot be checked, replaced returns
// false.
func (v *Volume) replaced(stats *Stats) bool {
	v.mu.Lock()
	another := v.last != nil && stats != nil && stats.fsid != v.last.fsid
	v.mu.Unlock()
	if !another && v.isCurrent() {
		return false
	}
	now := v.changes.Now()
	mark, err := mount.Look(v.Mountpoint)
	if err != nil {
		return errors.Is(err, mount.ErrNoMount) || errors.Is(err, mount.ErrNotExist)
	}
	if !v.identity.Bears(mark) {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.seen = now
	return false
}

// errOtherMount means that the path now leads to another filesystem.
var errOtherMount = errkind.New(errkind.NotFound, "it was unmounted")

func statfs(path string) (*Stats, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return nil, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	block := uint64(st.Bsize)
	return &Stats{
		Bytes:  Usage{Total: st.Blocks * block, Used: (st.Blocks - st.Bfree) * block, Available: st.Bavail * block},
		Inodes: Usage{Total: st.Files, Used: st.Files - st.Ffree, Available: st.Ffree},
		at:     time.Now(),
		fsid:   st.Fsid,
	}, nil
}

// remembered returns the last statistics if the filesystem has not answered for measureLimit. For a
// shorter wait it returns an error.
func (v *Volume) remembered(waited time.Duration) (Stats, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.last == nil || waited < measureLimit {
		return Stats{}, errkind.New(errkind.DeadlineExceeded, "volume %s: the filesystem has not answered for %v: ask again", v.Mountpoint, waited.Round(time.Millisecond))
	}
	stats := *v.last
	if v.watch != nil {
		stats.Conditions, _ = v.watch.Latest()
	}
	stats.Conditions = health.Unanswered(stats.Conditions, v.FSType, v.Mountpoint, stats.at)
	return stats, nil
}
