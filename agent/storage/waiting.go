package storage

import (
	"fmt"
	"maps"
	"slices"
)

// atDisk notes, until done is called, that a call is at a storage's disk and may have to wait for
// it. The caller has the mount point's turn.
func (t *Table) atDisk(m *mounted) (done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.atDisks[m] = true
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.atDisks, m)
	}
}

// Waiting lists the disks, each with its mount point, that calls may be waiting for while they
// mount or unmount storages of the given holders. Without holders it lists those of all storages.
func (t *Table) Waiting(holders ...string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := maps.Clone(t.atDisks)
	for mountPoint, m := range t.intents {
		if t.mounts[mountPoint] != m {
			all[m] = true
		}
	}
	var names []string
	for m := range all {
		if of := m.heldOrNeeded(); len(holders) == 0 || slices.ContainsFunc(holders, func(holder string) bool { return slices.Contains(of, holder) }) {
			names = append(names, fmt.Sprintf("%s at %s", m.origin().path, m.mountPoint))
		}
	}
	slices.Sort(names)
	return names
}
