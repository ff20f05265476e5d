package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// Usage is how much of something a volume has: bytes, or inodes.
type Usage struct {
	Total, Used, Available uint64
}

// Stats is what a volume holds and how it is.
type Stats struct {
	Bytes, Inodes Usage
	Conditions    []health.Condition // none where it is healthy
	at            time.Time
	fsid          unix.Fsid // of a tmpfs, which one it was: on kernels before 6.8 nothing else tells
}

// measureLimit is how long statistics wait for a filesystem that does not
// answer, before they are answered from memory. Kata's clients give up after 2 s.
const measureLimit = time.Second

// measurement is a statfs that is under way, for all who ask meanwhile: of a
// filesystem that hangs, one thread waits and not one a call.
type measurement struct {
	began time.Time     // when somebody first waited for it
	done  chan struct{} // nil until somebody waits for it; closed at its end
	stats *Stats
	err   error
}

// Stats measures the volume at path as the kubelet does: what is available
// leaves root's reserve out, what is used does not. A filesystem that does not
// answer in time is answered for from memory, with a condition that says so.
func (t *Table) Stats(ctx context.Context, path string) (Stats, error) {
	v, err := t.Lookup(path)
	if err != nil {
		return Stats{}, err
	}
	return t.statsOf(ctx, v)
}

// statsOf is Stats of a volume that was mounted when it was looked up.
func (t *Table) statsOf(ctx context.Context, v *Volume) (Stats, error) {
	stats, err := v.stats(ctx)
	if !errors.Is(err, errOtherMount) {
		return stats, err
	}
	// It was mounted again since Lookup.
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
	ctx, cancel := context.WithTimeout(ctx, measureLimit)
	defer cancel()
	select {
	case <-m.done:
	case <-ctx.Done():
		return v.remembered(time.Since(m.began))
	}
	if m.err != nil {
		return Stats{}, m.err
	}
	stats := *m.stats
	if v.watch != nil {
		var err error
		if stats.Conditions, err = v.watch.Conditions(ctx); err != nil {
			return Stats{}, errkind.New(errkind.DeadlineExceeded, "volume %s: %w: ask again", v.Mountpoint, err)
		}
	}
	return stats, nil
}

// StatsAtOnce is Stats where nothing has to be waited for, and otherwise false.
// It is for the goroutine that reads a connection. While FollowMounts runs and no mount
// changes it makes one system call: then somebody else's mount in the volume's place is
// found as soon as the kernel has woken who follows, and what it holds at once.
func (t *Table) StatsAtOnce(path string) (Stats, bool) {
	v := t.at(path)
	if v == nil {
		return Stats{}, false
	}
	conditions, ok := v.conditionsAtOnce()
	if !ok {
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

// conditionsAtOnce returns what is wrong with a volume that is known and whose
// statfs waits for nobody: one that is watched, or a tmpfs, which has no device
// that could fail. virtio-fs, FUSE and NFS ask a server, which may not answer: for what lies
// behind one, too.
func (v *Volume) conditionsAtOnce() ([]health.Condition, bool) {
	switch {
	case v.behind != "":
		return nil, false
	case v.watch == nil:
		return nil, v.FSType == "tmpfs"
	}
	return v.watch.Latest()
}

// beginAgain makes the measurement of a volume that was measured before, when the mount was
// looked at: only against that can its filesystem be told from another one. It returns nil
// where there is none to make.
func (v *Volume) beginAgain() *measurement {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.last == nil || v.measuring != nil {
		return nil
	}
	v.measuring = &measurement{}
	return v.measuring
}

// begin joins the measurement that is under way, or makes one, which the caller
// is to measure. Either is waited for by its done.
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
	other := v.replaced(m.stats) // behind it: a mount in between is found
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

// isCurrent reports whether no mount has changed since the volume was seen in its place.
func (v *Volume) isCurrent() bool {
	now := v.changes.Now()
	v.mu.Lock()
	defer v.mu.Unlock()
	return now != 0 && now == v.seen
}

// replaced reports whether the volume is not what its path leads to any more. It looks where a
// mount has changed, and where statfs answers with another identity than last: what was
// mounted, or unmounted, in this moment. Of what cannot be looked at it says nothing.
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

// errOtherMount means that the path leads to another filesystem by now.
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

// remembered is the last statistics, where the filesystem has not answered for a while. A
// caller who waits for less learns only that.
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
	stats.Conditions = health.Unanswered(stats.Conditions, v.FSType, v.Mountpoint, waited, stats.at)
	return stats, nil
}
