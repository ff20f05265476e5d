// Package volume is the heart of the agent: one mounted volume, and the table
// of them. The kernel's mountinfo is the truth, so that a volume which someone
// else has mounted is a volume too; the table only remembers what it has seen.
// A volume grows by one call at a time, under its own lock, and is not unmounted
// meanwhile.
package volume

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/turns"
)

// Table finds volumes by where they are mounted.
type Table struct {
	monitor *health.Monitor
	syncing syncing

	walks   turns.Turns // into mounts, by mount point
	looks   turns.Turns // at volumes that are known, by mount point
	changes mount.Changes

	mu      sync.Mutex
	volumes map[string]*Volume // by mount point
	hidden  []*Volume          // that other mounts cover, and that are mounted still
}

// NewTable returns a Table whose volumes are watched by monitor.
func NewTable(monitor *health.Monitor) *Table {
	return &Table{monitor: monitor, volumes: map[string]*Volume{}}
}

// Heard is the last record of the kernel's log whose meaning is in Past, for the agent after
// this one.
func (t *Table) Heard() uint64 { return t.monitor.Heard() }

// HearFrom has the kernel's log read from behind a record that the agent before this one has
// Heard.
func (t *Table) HearFrom(record uint64) { t.monitor.HearFrom(record) }

// FollowMounts has statistics look at a volume's mount only when mounts have changed, until
// ctx ends. It returns ctx's error, or why it cannot.
func (t *Table) FollowMounts(ctx context.Context) error { return t.changes.Follow(ctx) }

// Lookup returns the volume that is mounted at path. What does not exist is
// NotFound, what is no mount point InvalidArgument. A volume that nobody owns is watched
// without a write to it.
func (t *Table) Lookup(path string) (*Volume, error) {
	return t.lookup(path, mount.Identity{}, health.Past{}, t.look)
}

// Own is Lookup for who has mounted the volume, or has taken it over, and unmounts it: its
// health is probed by writing from now on. past is what was remembered of a mount
// before the agent's restart. It is of no account where another one is there now, or the
// volume is known already. Where a server that the path leads through does not answer in
// time, mountinfo says what is mounted there.
func (t *Table) Own(path string, of mount.Identity, past health.Past) error {
	v, err := t.lookup(path, of, past, t.look)
	if errkind.Of(err) == errkind.DeadlineExceeded {
		v, err = t.lookup(path, of, past, func(string, *Volume) (mount.Mark, error) { return mount.Mark{}, mount.ErrUnknown })
	}
	if err == nil && v.watch != nil {
		v.watch.Own()
	}
	return err
}

// Observe is Lookup for who only wants the volume to be watched from now on.
func (t *Table) Observe(path string) error {
	_, err := t.Lookup(path)
	return err
}

// Disown ends Own for who leaves the volume at path mounted, as somebody else's.
func (t *Table) Disown(path string) {
	if v := t.known(path); v != nil && v.watch != nil {
		v.watch.Disown()
	}
}

func (t *Table) lookup(path string, of mount.Identity, past health.Past, look func(path string, known *Volume) (mount.Mark, error)) (*Volume, error) {
	if !filepath.IsAbs(path) {
		return nil, errkind.New(errkind.InvalidArgument, "volume path %.200q is not absolute", path)
	}
	if strings.ContainsRune(path, 0) {
		return nil, errkind.New(errkind.InvalidArgument, "volume path %.200q holds a zero byte", path)
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
				t.lost(known) // someone else has unmounted it, or covered it
			}
			return nil, refuseLook(path, err)
		}
		if known != nil && known.identity.Same(found.identity) {
			return known, nil
		}
		if found.Device.Path != "" && found.identity.Same(of) && of.IsMount() {
			found.past = past
		}
		found.changes = &t.changes
		if found = t.replace(path, known, found); found != nil {
			return found, nil
		} // or another call has found a newer mount meanwhile
	}
}

func (t *Table) at(path string) *Volume {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.volumes[path]
}

// known returns the volume that was seen at path last, also where it is hidden now.
func (t *Table) known(path string) *Volume {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.volumes[path]; v != nil {
		return v
	}
	for _, v := range slices.Backward(t.hidden) {
		if v.Mountpoint == path {
			return v
		}
	}
	return nil
}

// replace puts a volume into the place of the one that the caller has seen there; nil
// stands for none. It returns the one that is there now, which is a hidden one where found is
// that one's mount; nil where another call has been faster.
func (t *Table) replace(path string, known, found *Volume) *Volume {
	stand := standing()
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
	} else if found.Device.Path != "" {
		found.watch = t.monitor.Watch(health.Target{Mountpoint: path, FSType: found.FSType, Device: found.Device, Mount: found.identity, Lost: func() { t.lost(found) }}, found.past)
	}
	t.volumes[path] = found
	return found
}

// standing returns what tells whether a volume is mounted still, in sight or not. Where
// mountinfo cannot be read nothing is.
func standing() func(*Volume) bool {
	mounts, _ := mount.All()
	return func(v *Volume) bool {
		return slices.ContainsFunc(mounts, func(m *mount.Info) bool { return m.Mountpoint == v.Mountpoint && m.ID == v.identity.ID })
	}
}

// hide forgets a volume, but for one that is mounted still: when it is seen again it is
// whose it was, with what is remembered of it, and under its own lock. t.mu is held.
func (t *Table) hide(v *Volume, current func(*Volume) bool) {
	delete(t.volumes, v.Mountpoint)
	if v.watch != nil {
		v.watch.Rest()
	}
	t.hidden = append(t.hidden, v)
	t.forgetHidden(func(v *Volume) bool { return !current(v) })
}

// forgetHidden forgets hidden volumes. t.mu is held.
func (t *Table) forgetHidden(which func(*Volume) bool) {
	t.hidden = slices.DeleteFunc(t.hidden, func(v *Volume) bool {
		gone := which(v)
		if gone && v.watch != nil {
			v.watch.End()
		}
		return gone
	})
}

func refuseLook(path string, err error) error {
	switch {
	case errors.Is(err, mount.ErrNotExist):
		return errkind.New(errkind.NotFound, "volume %.200q does not exist in this guest", path)
	case errors.Is(err, mount.ErrNoMount):
		return errkind.New(errkind.InvalidArgument, "%.200q is no mount point: name the path that the volume is mounted at", path)
	}
	return err
}

// Quiet calls do while neither a probe nor a growth is in the volume at path, and forgets the
// volume where do has unmounted it. If a probe or growth has not ended before ctx, Quiet
// returns an error and does not call do.
func (t *Table) Quiet(ctx context.Context, path string, do func() (gone bool, err error)) error {
	v := t.known(path)
	if v == nil {
		_, err := do()
		return err
	}
	done, err := v.alone(ctx)
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

// Past returns what the watch of the volume at path remembers, and of which
// mount: of none, and nothing, where no volume is watched there.
func (t *Table) Past(path string) (of mount.Identity, past health.Past) {
	v := t.known(path)
	if v == nil || v.watch == nil {
		return mount.Identity{}, health.Past{}
	}
	return v.identity, v.watch.Past()
}

// Remember adds what was remembered of the volume at path before it was unmounted, where it
// is mounted again as it was.
func (t *Table) Remember(path string, past health.Past) {
	if v := t.at(path); v != nil && v.watch != nil && past != (health.Past{}) {
		v.watch.Remember(past)
	}
}

// Forget ends what the table knows of the volume at path, if there is one.
func (t *Table) Forget(path string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.volumes[path]; v != nil {
		t.forget(v)
	}
	t.forgetHidden(func(v *Volume) bool { return v.Mountpoint == path })
}

// forget ends what the table does with a volume. t.mu is held, so nothing is waited for.
func (t *Table) forget(v *Volume) {
	delete(t.volumes, v.Mountpoint)
	if v.watch != nil {
		v.watch.End()
	}
}

// lost ends a volume that is not mounted any more, or not in sight, and no other one that
// is at its place by now: the next question starts anew.
func (t *Table) lost(v *Volume) {
	stand := standing()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.volumes[v.Mountpoint] == v {
		t.hide(v, stand)
	} else {
		t.forgetHidden(func(v *Volume) bool { return !stand(v) })
	}
}
