// Package mount lists mounts and identifies them. It reads mountinfo
// (Documentation/filesystems/proc.rst, 3.5) and defines the Identity by which storage, volume,
// health and the state file recognize a mount. It also has the calls that mount and unmount, with
// their options and mount points. The owner of a mount, and whether it may be unmounted, are up to
// the callers.
//
// Lookups do not wait for a disk or a server, because the kernel has the answers in memory.
// Detached, MakePoint, Unmount and Idle block as long as a disk or a server does.
package mount

import (
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

// Read parses mounts in the format of /proc/PID/mountinfo.
func Read(text io.Reader) ([]*Info, error) { return mountinfo.GetMountsFromReader(text, nil) }

// At returns the mounts at a path without symbolic links, from bottom to top: the path leads to the
// last one. The result is empty if nothing is mounted there.
func At(path string) ([]*Info, error) {
	found, err := mountinfo.GetMounts(stackAt(path))
	if err != nil || len(found) < 2 {
		return found, err
	}
	all, err := All()
	return ListOf(all).Stack(path), err
}

// Hiding returns the mount over a parent directory that hides m, so that no path leads to m. It
// returns nil if m is in sight or unmounted.
func Hiding(m *Info) (*Info, error) {
	all, err := All()
	if err != nil {
		return nil, err
	}
	return ListOf(all).Hiding(m), nil
}

// isBelow reports whether a clean path is below another one. It copies neither.
func isBelow(path, above string) bool {
	return len(path) > len(above) && path[len(above)] == '/' && strings.HasPrefix(path, above)
}

// Topmost returns the last mount of At, or nil if nothing is mounted.
func Topmost(path string) (*Info, error) {
	mounts, err := At(path)
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	return mounts[len(mounts)-1], nil
}

// Enclosing returns the mount point of the mount that contains a clean path: the longest mount
// point that is the path itself or one of its parents.
func Enclosing(path string) (string, error) {
	all, err := All()
	found := "/"
	for _, m := range all {
		if (path == m.Mountpoint || isBelow(path, m.Mountpoint)) && len(m.Mountpoint) > len(found) {
			found = m.Mountpoint
		}
	}
	return found, err
}

// served are the filesystems that ask a server, which may not answer, whether a name in them is
// still valid each time a path leads through it (d_revalidate in the kernel's
// Documentation/filesystems/vfs.rst). Other filesystems know this for every mount point in them.
var served = []string{"fuse", "fuseblk", "virtiofs", "9p", "nfs", "nfs4", "cifs", "smb3", "ceph", "afs"}

// IsServed reports whether a filesystem, by its type in mountinfo, asks a server for its contents.
func IsServed(fstype string) bool {
	fstype, _, _ = strings.Cut(fstype, ".") // fuse.sshfs
	return slices.Contains(served, fstype)
}

// stackAt selects every mount at a path. mountinfo's SingleEntryFilter stops at the first one,
// which the others hide.
func stackAt(path string) mountinfo.FilterFunc {
	return func(m *Info) (skip, stop bool) { return m.Mountpoint != path, false }
}

// number returns the dev_t that mountinfo shows for a filesystem. It is a disk's number if the
// filesystem is on one disk and its type shows that; btrfs does not.
func number(m *Info) uint64 { return unix.Mkdev(uint32(m.Major), uint32(m.Minor)) }

// OnDisk reports whether a mount's data is on a disk, and is lost with the disk. btrfs is on a disk
// although it shows a number that is no disk's.
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
