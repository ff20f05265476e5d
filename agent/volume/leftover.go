package volume

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/state"
)

// leasesVersion counts the additions to the contents of the leases' file.
const leasesVersion = 1

// leasesFile is the contents of the leases' file: the volumes that may be frozen.
type leasesFile struct {
	state.Header
	Frozen []record `json:"frozen"`
}

// record is a volume that may be frozen.
type record struct {
	Path  string         `json:"path"`
	Mount mount.Identity `json:"mount"`
}

// KeepLeases thaws the volumes that an earlier agent has left frozen, and saves the volumes of each
// lease in the file from now on. It must run before Freeze. It waits a while for disks that do not
// answer; their volumes are thawed when they do. With a nil file it does nothing.
func (t *Table) KeepLeases(file *state.File) error {
	if file == nil {
		return nil
	}
	var was leasesFile
	found, err := file.Read(&was)
	if err != nil {
		aside, asideErr := file.Aside()
		err = errors.Join(fmt.Errorf("leases %s, kept as %s, are not understood; a volume that an earlier agent has frozen must be thawed by hand (fsfreeze -u): %w", file.Path(), aside, err), asideErr)
	}
	a := t.leases
	a.mu.Lock()
	a.state = file
	if found && err == nil {
		a.left = was.Frozen
	}
	left := slices.Clone(a.left)
	a.mu.Unlock()
	var wait sync.WaitGroup
	for _, r := range left {
		wait.Add(1)
		go t.thawLeft(r, sync.OnceFunc(wait.Done))
	}
	done := make(chan struct{})
	go func() { wait.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(hungLimit):
	}
	err = errors.Join(err, a.save())
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range a.left {
		err = errors.Join(err, fmt.Errorf("volume %.200q is not thawed yet: its disk does not answer, or it is not mounted in sight", r.Path))
	}
	return err
}

// thawLeft thaws a volume that an earlier agent has left frozen. It calls looked when that is done,
// or when no mount of the volume is in sight: then it waits for one.
func (t *Table) thawLeft(r record, looked func()) {
	defer looked()
	for {
		changes := t.changes.Next()
		err := r.thaw()
		if err == nil || errors.Is(err, filesystem.ErrNotFrozen) {
			break
		}
		if errors.Is(err, mount.ErrNotExist) {
			looked()
			<-changes
			continue
		}
		<-time.After(thawAgain)
	}
	a := t.leases
	a.mu.Lock()
	a.left = slices.DeleteFunc(a.left, func(o record) bool { return o.Path == r.Path && o.Mount.Same(r.Mount) })
	a.mu.Unlock()
	_ = a.save() // otherwise the next agent looks once more
}

// thaw thaws the volume, by any mount of its filesystem. The error is mount.ErrNotExist if no such
// mount is in sight.
func (r record) thaw() error {
	mounts, err := mount.Now()
	if err != nil {
		return err
	}
	of := func(i mount.Identity) mount.Identity { i = i.Filesystem(); i.Root = ""; return i }
	err = mount.ErrNotExist
	for _, m := range mounts.InSight() {
		identity := mounts.Identify(m)
		if r.Mount.FSType == "" || !of(identity).Same(of(r.Mount)) {
			continue
		}
		root, openErr := (&Volume{Mountpoint: m.Mountpoint, identity: identity}).openRoot()
		if openErr != nil {
			err = openErr
			continue
		}
		defer root.Close()
		return filesystem.Thaw(root)
	}
	return err
}

// put keeps a lease until remove, in the file too. EndLeases waits for what it keeps.
func (a *leases) put(l *lease) error {
	a.mu.Lock()
	if a.ending.Err() != nil {
		a.mu.Unlock()
		return errEnding
	}
	a.all[l.name] = l
	a.mu.Unlock()
	return a.save()
}

func (a *leases) remove(l *lease) {
	a.mu.Lock()
	_, kept := a.all[l.name]
	delete(a.all, l.name)
	a.mu.Unlock()
	if kept {
		_ = a.save() // otherwise the next agent finds a volume that is not frozen
	}
}

func (a *leases) save() error {
	if a.state == nil {
		return nil
	}
	return a.state.Save(func() any {
		a.mu.Lock()
		defer a.mu.Unlock()
		now := leasesFile{Header: a.state.Header(leasesVersion), Frozen: slices.Clone(a.left)}
		for _, l := range a.all {
			for _, p := range l.parts {
				if p.of == nil && !p.isReleased() {
					now.Frozen = append(now.Frozen, record{p.volume.Mountpoint, p.volume.identity})
				}
			}
		}
		sort.Slice(now.Frozen, func(i, j int) bool { return now.Frozen[i].Path < now.Frozen[j].Path })
		return now
	})
}
