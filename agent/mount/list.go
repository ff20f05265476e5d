package mount

import (
	"cmp"
	"slices"
	"sync"
)

// List is one reading of mountinfo. Callers share it and do not change it.
//
// It takes as long to make as there are mounts, and to search as a path has folders: an examination
// of each of many volumes does not compare each with all others.
type List struct {
	All []*Info // in the order of mountinfo

	byID   map[int]*Info
	at     map[string][]*Info // by mount point
	within map[place]*Info    // the first mount at a place; none that is its own parent
	served []*Info            // with a server, by IsServed

	inSight func() map[int]bool   // by ID; made when it is first asked for
	unique  func() map[int]uint64 // by ID; the same
}

// place is a path in a mount, which has the ID parent.
type place struct {
	parent int
	path   string
}

// ListOf indexes a list of all mounts, in any order. Linux 6.18 lists mounts in order of creation,
// and move_mount(2) may put an older mount on top of a newer one.
func ListOf(all []*Info) *List {
	l := &List{All: all, byID: make(map[int]*Info, len(all)), at: make(map[string][]*Info, len(all)), within: make(map[place]*Info, len(all))}
	for i, m := range all {
		l.byID[m.ID] = m
		if before := l.at[m.Mountpoint]; before != nil {
			l.at[m.Mountpoint] = append(before, m)
		} else {
			l.at[m.Mountpoint] = all[i : i+1 : i+1]
		}
		p := place{m.Parent, m.Mountpoint}
		if l.within[p] == nil && m.Parent != m.ID { // the root of an initramfs is its own parent
			l.within[p] = m
		}
		if IsServed(m.FSType) {
			l.served = append(l.served, m)
		}
	}
	l.inSight = sync.OnceValue(l.findInSight)
	l.unique = sync.OnceValue(uniques)
	return l
}

// Stack returns the mounts at a path without symbolic links, from bottom to top: the path leads to
// the last one.
func (l *List) Stack(path string) []*Info {
	found := slices.Clone(l.at[path])
	if len(found) < 2 {
		return found
	}
	levels := map[*Info]int{} // the number of mounts below at the same path; mounts that no path leads to sort first
	for _, m := range found {
		for p := l.byID[m.Parent]; p != nil && p.Mountpoint == path && levels[m] < len(found); p = l.byID[p.Parent] {
			levels[m]++
		}
		if l.Hiding(m) != nil {
			levels[m] -= len(l.All)
		}
	}
	slices.SortStableFunc(found, func(a, b *Info) int { return cmp.Compare(levels[a], levels[b]) })
	return found
}

// IsPoint reports whether something is mounted at a clean path.
func (l *List) IsPoint(path string) bool { return len(l.at[path]) > 0 }

// Has reports whether a mount with an ID is at a path, visible or not.
func (l *List) Has(id int, path string) bool {
	return l.byID[id] != nil && l.byID[id].Mountpoint == path
}

// IsInSight reports whether the mount with an ID is reachable by its mount point.
func (l *List) IsInSight(id int) bool {
	return l.inSight()[id]
}

// Seen returns the mount with an ID if IsInSight, else nil.
func (l *List) Seen(id int) *Info {
	if !l.IsInSight(id) {
		return nil
	}
	return l.byID[id]
}

// InSight returns the mounts that are reachable by their mount points.
func (l *List) InSight() (found []*Info) {
	for _, m := range l.All {
		if l.IsInSight(m.ID) {
			found = append(found, m)
		}
	}
	return found
}

func (l *List) findInSight() map[int]bool {
	found := make(map[int]bool, len(l.All))
	for _, m := range l.All {
		if !l.isCovered(m) && l.Hiding(m) == nil {
			found[m.ID] = true
		}
	}
	return found
}

// isCovered reports whether another mount lies on a mount's root, unless that is the process's
// root.
func (l *List) isCovered(m *Info) bool {
	return m.Mountpoint != "/" && l.within[place{m.ID, m.Mountpoint}] != nil
}

// Hiding returns the mount over a parent directory that hides m, so that no path leads to m. It
// returns nil if m is in sight. A mount on the process's root hides nothing from the process.
func (l *List) Hiding(m *Info) *Info {
	for range l.byID { // bounded, because an invalid text may contain a cycle
		for end := 1; end < len(m.Mountpoint); end++ {
			if m.Mountpoint[end] != '/' {
				continue
			}
			if over := l.within[place{m.Parent, m.Mountpoint[:end]}]; over != nil {
				return over
			}
		}
		parent := l.byID[m.Parent]
		if parent == nil || parent == m {
			return nil
		}
		m = parent
	}
	return nil
}

// Behind returns the mount point of a filesystem with a server that a clean path leads through, or
// "". The filesystem that is mounted at the path itself does not count.
func (l *List) Behind(path string) (mountPoint string) {
	for _, m := range l.served {
		if path != m.Mountpoint && (m.Mountpoint == "/" || isBelow(path, m.Mountpoint)) {
			return m.Mountpoint
		}
	}
	return ""
}
