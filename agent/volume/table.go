// Package volume implements mounted volumes and the table of them. The kernel's mountinfo is
// authoritative: a volume that somebody else has mounted is a volume too, and the table only caches
// what it has seen. A volume grows by one call at a time, under its own lock, and is not unmounted
// meanwhile.
//
// A lease freezes several volumes or none, and has their locks until they are thawed:
//
//	one cannot be frozen          those that are frozen are thawed, and the error names it
//	a disk hangs in FIFREEZE      the call gives up in time and thaws the others; this volume is
//	                              locked, and thawed as soon as its FIFREEZE returns
//	a disk hangs in FITHAW        only its volume stays frozen, because each has a thread of its own
//	twice                         refused at once by a volume that a lease has, and so is a growth
//	frozen by another program     refused, and not thawed
//	thawed by another program     Thaw and the lease's call return Aborted
//	its time or its caller ends   thawed by a thread that has done nothing else
//	thawed twice                  the second call gets NotFound; beside the first, it gets its result
//	to be unmounted               the lease is ended first
//	measured, flushed, synced     answered: nothing is unwritten
//	the agent ends                all leases are ended
//	the agent is killed           the file of leases names each volume before it is frozen, and the
//	                              next agent thaws it; PID 1 has no such file, because the guest ends
//
// Two leases do not wait for each other, because each takes its locks in the order of the paths.
package volume

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/turns"
)

// Table finds volumes by their mount points.
type Table struct {
	monitor *health.Monitor
	syncing syncing

	walks    turns.Turns // for lookups inside mounts, by mount point
	looks    turns.Turns // for lookups of known volumes, by mount point
	changes  mount.Changes
	watchers watchers
	leases   *leases

	trims   turns.Turns   // for trims, by device
	trimmed atomic.Uint64 // bytes that trims have given back

	mu      sync.Mutex
	volumes map[string]*Volume // by mount point
	hidden  []*Volume          // covered by other mounts, but still mounted

	listing  chan struct{} // full while a goroutine compares watchers.listed with mountinfo
	relisted *mount.List   // the mounts at the last look; guarded by listing
}

// NewTable returns a Table whose volumes monitor watches.
func NewTable(monitor *health.Monitor) *Table {
	return &Table{monitor: monitor, volumes: map[string]*Volume{}, listing: make(chan struct{}, 1), leases: newLeases()}
}

// Heard returns the number of the last record of the kernel's log that Past accounts for. It is
// saved for the next agent.
func (t *Table) Heard() uint64 { return t.monitor.Heard() }

// HearFrom makes the monitor read the kernel's log from the record after the one that the previous
// agent's Heard returned.
func (t *Table) HearFrom(record uint64) { t.monitor.HearFrom(record) }

// FollowMounts tracks changes of mounts until ctx ends, so that statistics check a volume's mount
// only after a change, and health looks at a volume whose mount has changed. It returns ctx's
// error, or the reason why mounts cannot be followed.
func (t *Table) FollowMounts(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go t.monitor.Mounts(ctx, &t.changes)
	return t.changes.Follow(ctx)
}

// Lookup returns the volume that is mounted at path. The error is NotFound if path does not exist,
// and InvalidArgument if it is no mount point. A volume that nobody owns is watched without writes
// to it.
func (t *Table) Lookup(path string) (*Volume, error) {
	return t.lookup(path, mount.Identity{}, health.Past{}, t.look)
}

// Own is Lookup for a caller that has mounted the volume, or has taken it over, and will unmount
// it. From now on the volume's health is probed by writing. of is a mount's identity, and past is
// what an earlier agent remembered of this mount; past is ignored if another mount is there now, or
// if the volume is known already. If another mount covers the mount of, the covered volume is
// owned. A mount of another filesystem than that of the mount of is not owned. If a server that the
// path leads through does not answer in time, mountinfo decides which mount is there.
func (t *Table) Own(path string, of mount.Identity, past health.Past) error {
	if v := t.covered(path, of, past); v != nil {
		v.own()
		return nil
	}
	v, err := t.lookup(path, of, past, t.look)
	if errkind.Of(err) == errkind.DeadlineExceeded {
		v, err = t.lookup(path, of, past, func(string, *Volume) (mount.Mark, error) { return mount.Mark{}, mount.ErrUnknown })
	}
	if err == nil && v.identity.Filesystem().Same(of.Filesystem()) {
		v.own()
	}
	return err
}

// Observe is Lookup for a caller that only wants the volume to be watched from now on.
func (t *Table) Observe(path string) error {
	_, err := t.Lookup(path)
	return err
}

// Disown undoes Own for a caller that leaves the volume at path mounted, as somebody else's.
func (t *Table) Disown(path string) {
	if v := t.known(path); v != nil && v.watch != nil {
		v.watch.Disown()
		v.watchers.changed(v)
	}
}

func (t *Table) lookup(path string, of mount.Identity, past health.Past, look func(path string, known *Volume) (mount.Mark, error)) (*Volume, error) {
	if !filepath.IsAbs(path) {
		return nil, errkind.New(errkind.InvalidArgument, "volume path %.200q is not absolute", path)
	}
	if strings.ContainsRune(path, 0) {
		return nil, errkind.New(errkind.InvalidArgument, "volume path %.200q contains a zero byte", path)
	}
	path = filepath.Clean(path)
	for {
		known := t.at(path)
		mark, err := look(path, known)
		if err == nil && known != nil && known.identity.Bears(mark) {
			return known, nil
		}
		var found *Volume
		if err == nil || errors.Is(err, mount.ErrUnknown) {
			found, err = discover(path, mark)
		}
		if err != nil {
			if known != nil && errkind.Of(err) != errkind.DeadlineExceeded {
				t.lost(known) // somebody else has unmounted or covered it
			}
			return nil, refuseLook(path, err)
		}
		if known != nil && known.identity.Same(found.identity) {
			return known, nil
		}
		if found.Device.Path != "" && found.identity.Same(of) && of.IsMount() {
			found.past = past
		}
		found.changes, found.watchers = &t.changes, &t.watchers
		if found = t.replace(path, known, found); found != nil {
			return found, nil
		} // otherwise another call has found a newer mount meanwhile
	}
}

func (t *Table) at(path string) *Volume {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.volumes[path]
}

// known returns the volume that was last seen at path, even if it is hidden now.
func (t *Table) known(path string) *Volume { return t.knownAs(path, mount.Identity{}) }

// knownAs returns the known volume at path whose mount has an identity. Fields of the identity may
// be missing.
func (t *Table) knownAs(path string, of mount.Identity) *Volume {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.volumes[path]; v != nil && v.identity.Same(of) {
		return v
	}
	for _, v := range slices.Backward(t.hidden) {
		if v.Mountpoint == path && v.identity.Same(of) {
			return v
		}
	}
	return nil
}

// replace puts found in the place of known, the volume that the caller has seen at path (nil for
// none). It returns the volume that is there now, which is a hidden one if found is the same mount.
// It returns nil if another call has replaced known first.
func (t *Table) replace(path string, known, found *Volume) *Volume {
	var stand func(*Volume) bool
	if known != nil { // a list of new volumes would read mountinfo once more for each
		stand = standing()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.volumes[path] != known {
		return nil
	}
	if known != nil {
		t.hide(known, stand)
	}
	was := slices.IndexFunc(t.hidden, func(v *Volume) bool {
		return v.Mountpoint == path && v.identity.IsMount() && v.identity.Same(found.identity)
	})
	if was >= 0 {
		found = t.hidden[was]
		t.hidden = slices.Delete(t.hidden, was, was+1)
		if found.watch != nil {
			found.watch.Again()
		}
	} else {
		t.leases.join(found)
		if found.Device.Path != "" {
			t.watch(found)
		}
	}
	t.volumes[path] = found
	return found
}

// standing returns a function that reports whether a volume is still mounted, visible or not. If
// mountinfo cannot be read, the function returns false.
func standing() func(*Volume) bool {
	mounts, err := mount.Now()
	return func(v *Volume) bool { return err == nil && mounts.Has(v.identity.ID, v.Mountpoint) }
}

// hide takes a volume out of sight, and keeps it as hidden if it is still mounted. When it is
// visible again it has the same owner, past and lock. t.mu is held.
func (t *Table) hide(v *Volume, current func(*Volume) bool) {
	delete(t.volumes, v.Mountpoint)
	if v.watch != nil {
		v.watch.Rest()
	}
	t.hidden = append(t.hidden, v)
	t.forgetHidden(func(v *Volume) bool { return !current(v) })
}

// forgetHidden forgets the hidden volumes that match. t.mu is held.
func (t *Table) forgetHidden(which func(*Volume) bool) {
	t.hidden = slices.DeleteFunc(t.hidden, func(v *Volume) bool {
		gone := which(v)
		if gone && v.watch != nil {
			v.watch.End()
		}
		return gone
	})
}

// covered returns the volume at path whose mount has the identity of, if another mount covers it
// and it is watched, or can be. past is what an earlier agent remembered of it. Its watch hears the
// kernel's log and looks when the volume is in sight again.
func (t *Table) covered(path string, of mount.Identity, past health.Past) *Volume {
	if !of.IsMount() {
		return nil
	}
	mounts, err := mount.Now()
	if err != nil {
		return nil
	}
	stack := mounts.Stack(path)
	at := slices.IndexFunc(stack, func(m *mount.Info) bool { return mounts.Identify(m).Same(of) })
	if at < 0 || mounts.IsInSight(stack[at].ID) {
		return nil
	}
	v, err := newVolume(mounts, stack[at], mounts.Identify(stack[at]))
	if err != nil || v.Device.Path == "" {
		return nil
	}
	if known := t.knownAs(path, v.identity); known != nil {
		return known
	}
	v.past, v.changes, v.watchers = past, &t.changes, &t.watchers
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leases.join(v)
	t.watch(v)
	v.watch.Rest()
	t.hidden = append(t.hidden, v)
	return v
}

// watch makes the monitor watch a volume. t.mu is held.
func (t *Table) watch(v *Volume) {
	set := make(chan struct{})
	changed := func() {
		<-set // the first look may end before v has its watch
		t.watchers.changed(v)
	}
	v.watch = t.monitor.Watch(health.Target{Mountpoint: v.Mountpoint, FSType: v.FSType, Device: v.Device, Mount: v.identity, Options: v.options, Changed: changed, Frozen: v.isFrozen, Lost: func() { t.lost(v) }}, v.past)
	close(set)
}

func refuseLook(path string, err error) error {
	switch {
	case errors.Is(err, mount.ErrNotExist):
		return errkind.New(errkind.NotFound, "volume %.200q does not exist in this guest", path)
	case errors.Is(err, mount.ErrNoMount):
		return errkind.New(errkind.InvalidArgument, "%.200q is not a mount point, %w: name the path that the volume is mounted at", path, mount.ErrNoMount)
	}
	return err
}

// Quiet calls do while neither a probe nor a growth is in the volume at path, and after the end of
// a lease that has frozen it. It forgets the volume if do has unmounted it. If a probe or growth
// has not ended before ctx, Quiet returns an error and does not call do.
func (t *Table) Quiet(ctx context.Context, path string, do func() (gone bool, err error)) error {
	v := t.known(path)
	if v == nil {
		_, err := do()
		return err
	}
	done, err := v.aloneAndThawed(ctx)
	if err != nil {
		return err
	}
	defer done()
	gone, err := do()
	if gone {
		t.lost(v)
	}
	return err
}

// Past returns what the watch of a volume at path remembers, and zero if it is not watched. The
// volume's mount has the identity of, and may be covered by another mount. If of is zero, it is the
// volume in sight, or the one that was covered last.
func (t *Table) Past(path string, of mount.Identity) health.Past {
	v := t.knownAs(path, of)
	if v == nil || v.watch == nil {
		return health.Past{}
	}
	return v.watch.Past()
}

// Remember adds what was remembered of the volume at path before it was unmounted, after it was
// mounted again as before.
func (t *Table) Remember(path string, past health.Past) {
	if v := t.at(path); v != nil && v.watch != nil && past != (health.Past{}) {
		v.watch.Remember(past)
	}
}

// Forget forgets the volume at path, if there is one.
func (t *Table) Forget(path string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.volumes[path]; v != nil {
		t.forget(v)
	}
	t.forgetHidden(func(v *Volume) bool { return v.Mountpoint == path })
}

// forget forgets a volume. t.mu is held, so forget must not block.
func (t *Table) forget(v *Volume) {
	delete(t.volumes, v.Mountpoint)
	if v.watch != nil {
		v.watch.End()
	}
}

// lost forgets a volume that is no longer mounted or visible, but not another volume that is in its
// place by now. The next lookup starts anew.
func (t *Table) lost(v *Volume) {
	stand := standing()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.volumes[v.Mountpoint] == v {
		t.hide(v, stand)
		return
	}
	t.forgetHidden(func(v *Volume) bool { return !stand(v) })
	if slices.Contains(t.hidden, v) && v.watch != nil {
		v.watch.Rest() // it may have looked once after it was covered
	}
}
