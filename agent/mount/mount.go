// Package mount is what is mounted, and which mount it is: mountinfo
// (Documentation/filesystems/proc.rst, 3.5), and one Identity of a mount, by which
// storage, volume, health and the state file know it again. It also has the kernel's calls
// that mount and unmount, with their options and mount points; whose a mount is, and whether
// it may go, is for its callers to know.
//
// Looking waits for no disk and no server: what is read the kernel has in memory. Detached,
// MakePoint, Unmount and Idle wait for as long as a disk or a server wants.
package mount

import (
	"cmp"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Info is a line of mountinfo.
type Info = mountinfo.Info

// All returns every mount of this process's namespace, in the order of mountinfo.
func All() ([]*Info, error) { return mountinfo.GetMounts(nil) }

// Read returns the mounts of a text as the kernel has it in /proc/PID/mountinfo.
func Read(text io.Reader) ([]*Info, error) { return mountinfo.GetMountsFromReader(text, nil) }

// At returns what is mounted at a path that holds no symbolic link, from below to above:
// the last one is what the path leads to. There is none where nothing is mounted.
func At(path string) ([]*Info, error) {
	found, err := mountinfo.GetMounts(stackAt(path))
	if err != nil || len(found) < 2 {
		return found, err
	}
	all, err := All()
	return Stack(all, path), err
}

// Stack is At of a list of all mounts, in any order: Linux 6.18 lists them as they were
// made, and move_mount(2) puts an older one on top of a newer one.
func Stack(all []*Info, path string) (found []*Info) {
	t := treeOf(all)
	for _, m := range all {
		if m.Mountpoint == path {
			found = append(found, m)
		}
	}
	levels := map[*Info]int{} // the mounts of the path below; those that no path leads to come first
	for _, m := range found {
		for p := t.byID[m.Parent]; p != nil && p.Mountpoint == path && levels[m] < len(found); p = t.byID[p.Parent] {
			levels[m]++
		}
		if t.hiding(m) != nil {
			levels[m] -= len(all)
		}
	}
	slices.SortStableFunc(found, func(a, b *Info) int { return cmp.Compare(levels[a], levels[b]) })
	return found
}

// Hiding returns what is mounted over a folder above a mount, so that no path leads to it;
// nil where it is in sight, or unmounted.
func Hiding(m *Info) (*Info, error) {
	all, err := All()
	if err != nil {
		return nil, err
	}
	return treeOf(all).hiding(m), nil
}

// InSight returns those mounts of a list of all that their mount points lead to.
func InSight(all []*Info) (found []*Info) {
	t := treeOf(all)
	for _, m := range all {
		if !t.isCovered(m) && t.hiding(m) == nil {
			found = append(found, m)
		}
	}
	return found
}

// tree is a list of mounts by how they lie on each other.
type tree struct {
	byID   map[int]*Info
	within map[int][]*Info // by their parents' IDs
}

func treeOf(all []*Info) tree {
	t := tree{map[int]*Info{}, map[int][]*Info{}}
	for _, m := range all {
		t.byID[m.ID] = m
		t.within[m.Parent] = append(t.within[m.Parent], m)
	}
	return t
}

// isCovered reports whether another mount lies on a mount's root, which is no process's.
func (t tree) isCovered(m *Info) bool {
	return m.Mountpoint != "/" && slices.ContainsFunc(t.within[m.ID], func(over *Info) bool { return over.Mountpoint == m.Mountpoint && over.ID != m.ID })
}

// hiding is Hiding. What lies on a process's root hides nothing from it.
func (t tree) hiding(m *Info) *Info {
	for range t.byID { // and no longer: a text may have a circle
		for _, over := range t.within[m.Parent] {
			if over.Mountpoint != "/" && strings.HasPrefix(m.Mountpoint, over.Mountpoint+"/") {
				return over
			}
		}
		if m = t.byID[m.Parent]; m == nil {
			return nil
		}
	}
	return nil
}

// Topmost returns the last of At, and nil where nothing is mounted.
func Topmost(path string) (*Info, error) {
	mounts, err := At(path)
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	return mounts[len(mounts)-1], nil
}

// Enclosing returns the mount point of the mount that a clean path leads into: that of
// the longest one above it, or the path's own.
func Enclosing(path string) (string, error) {
	all, err := All()
	found := "/"
	for _, m := range all {
		if (path == m.Mountpoint || strings.HasPrefix(path, m.Mountpoint+"/")) && len(m.Mountpoint) > len(found) {
			found = m.Mountpoint
		}
	}
	return found, err
}

// served are filesystems that ask a server, which may not answer, whether a name in them
// still stands, each time that a path leads through one (d_revalidate in the kernel's
// Documentation/filesystems/vfs.rst). The others know it of any mount point in them.
var served = []string{"fuse", "fuseblk", "virtiofs", "9p", "nfs", "nfs4", "cifs", "smb3", "ceph", "afs"}

// Behind returns the mount point of a filesystem that asks a server, and that a clean path
// leads through: "" where it leads through none. What is mounted at the path itself is not
// asked.
func Behind(all []*Info, path string) (mountPoint string) {
	for _, m := range all {
		fstype, _, _ := strings.Cut(m.FSType, ".") // fuse.sshfs
		if slices.Contains(served, fstype) && path != m.Mountpoint && (m.Mountpoint == "/" || strings.HasPrefix(path, m.Mountpoint+"/")) {
			return m.Mountpoint
		}
	}
	return ""
}

// stackAt keeps every mount at a path. mountinfo's SingleEntryFilter ends with
// the first, which the others hide.
func stackAt(path string) mountinfo.FilterFunc {
	return func(m *Info) (skip, stop bool) { return m.Mountpoint != path, false }
}

// number is the dev_t that mountinfo has of a filesystem. It is a disk's where the
// filesystem lies on one disk and its type says so: not on btrfs.
func number(m *Info) uint64 { return unix.Mkdev(uint32(m.Major), uint32(m.Minor)) }

// OnDisk reports whether a mount's data lies on a disk, and is lost with it: btrfs has
// a number without a disk.
func OnDisk(m *Info) bool { return m.Major != 0 || m.FSType == btrfs }

func readInfo(path string) ([]*Info, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return Read(file)
}

func hasDevice(mounts []*Info, device uint64) bool {
	for _, m := range mounts {
		for _, d := range devicesOf("/", m) {
			if d.Number == device {
				return true
			}
		}
	}
	return false
}
