package mount

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"sort"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

const btrfs = "btrfs"

// Identify returns the identity, without its UUID, of a mount that All, At or Topmost has just
// returned. If the mount has been unmounted meanwhile, its identity is not the Same as any mount's,
// as far as the kernel shows.
func Identify(m *Info) Identity {
	if mounts, err := Now(); err == nil && mounts.byID[m.ID] != nil && *mounts.byID[m.ID] == *m {
		return mounts.Identify(m)
	}
	return identify(m, uniques()[m.ID])
}

// Identify is the same for a mount of the list, which Now has just returned. It makes one list of
// the kernel's numbers for all of them.
func (l *List) Identify(m *Info) Identity { return identify(m, l.unique()[m.ID]) }

// identify is Identify of a mount whose never reused number is known, or 0.
func identify(m *Info, unique uint64) Identity {
	i := Filesystem(m)
	i.ID = m.ID
	i.Number = number(m)
	i.Unique = unique
	if m.FSType == "tmpfs" {
		i.Super = i.tmpfsID(m.Mountpoint)
	} else {
		i.folder = i.superFolder("/")
		i.Super = inodeOf(i.folder)
	}
	return i
}

// Filesystem returns the same as Identify(m).Filesystem(), with fewer system calls.
func Filesystem(m *Info) Identity {
	i := Identity{FSType: m.FSType, Root: m.Root, Devices: devicesOf("/", m)}
	if m.Major != 0 {
		i.Number = number(m)
	}
	if len(i.Devices) == 0 {
		i.Source = cmp.Or(m.Source, "none") // the kernel's word for an empty source
	}
	return i
}

// devicesOf returns the disks below a mount. It returns none if there is no disk or the kernel does
// not show it. root is "/" outside of tests.
func devicesOf(root string, m *Info) (found []Device) {
	switch {
	case m.Major != 0:
		return []Device{{number(m), blockdev.SeqOf(root, number(m))}}
	case m.FSType != btrfs:
		return nil
	}
	source, err := blockdev.NumberOf(m.Source)
	if err != nil {
		return nil
	}
	links, _ := filepath.Glob(filepath.Join(btrfsDir(root, source), "devices", "*"))
	for _, link := range links {
		text, err := os.ReadFile(filepath.Join(link, "dev"))
		if err != nil {
			continue
		}
		if n, err := blockdev.ParseNumber(string(text)); err == nil {
			found = append(found, Device{n, blockdev.SeqOf(root, n)})
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].Number < found[j].Number })
	return found
}

// btrfsDir returns the directory in sysfs of the btrfs on a device
// (Documentation/ABI/testing/sysfs-fs-btrfs), or "".
func btrfsDir(root string, device uint64) string {
	name, err := blockdev.NameOf(root, device)
	if err != nil {
		return ""
	}
	found, _ := filepath.Glob(filepath.Join(root, "sys/fs/btrfs/*/devices", name))
	if len(found) != 1 {
		return ""
	}
	return filepath.Dir(filepath.Dir(found[0]))
}

// superFolder returns the superblock's directory in sysfs, which exists as long as the superblock
// does. Its inode number is never reused, because the numbers count up (fs/kernfs/dir.c). The
// result is "" if there is none, and for a disk that is gone.
func (i Identity) superFolder(root string) string {
	switch {
	case i.FSType == btrfs && len(i.Devices) > 0:
		return btrfsDir(root, i.Devices[0].Number)
	case unix.Major(i.Number) == 0:
		return filepath.Join(root, "sys/class/bdi", fmt.Sprintf("0:%d", unix.Minor(i.Number)))
	}
	name, err := blockdev.NameOf(root, i.Number)
	if err != nil {
		return ""
	}
	return filepath.Join(root, "sys/fs", sysfsName(i.FSType), name)
}

// sysfsName returns the name below /sys/fs and /proc/fs of a filesystem's driver. ext4 serves ext3,
// too.
func sysfsName(fstype string) string {
	if fstype == "ext3" {
		return "ext4"
	}
	return fstype
}

func inodeOf(path string) uint64 {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return 0
	}
	return st.Ino
}

// tmpfsID replaces the inode of superFolder for a tmpfs, which has no such directory. Since Linux
// 5.14 a tmpfs has a random filesystem ID, which statfs returns. tmpfsID returns 0 if something
// else is mounted at path now, without a call to that filesystem, whose server may not answer.
func (i Identity) tmpfsID(path string) uint64 {
	if mark, err := Look(path); err != nil || mark.unique != i.Unique || mark.unique == 0 && mark.id != i.ID {
		return 0
	}
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil || st.Type != unix.TMPFS_MAGIC {
		return 0
	}
	return uint64(uint32(st.Fsid.Val[0])) | uint64(uint32(st.Fsid.Val[1]))<<32
}
