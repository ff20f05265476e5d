package mount

import (
	"slices"

	"golang.org/x/sys/unix"
)

// Identity tells a mount from every other one of the same boot, also from one that has
// got its number, its place or its disk's name. A field that is zero is not known, and
// is not compared: an Identity of a few fields stands for all mounts that have them.
//
// A mount's own number is given again at once (seen: 103, unmounted, mounted, 103), a
// disk's dev_t with the next disk, xfs answers statfs with nothing but that, a clone has
// the UUID of its original, and btrfs answers stat with a number that no disk has. So
// none of them proves anything alone.
type Identity struct {
	// Unique is the kernel's number of the mount that is never given again. Linux
	// has it since 6.8.
	Unique uint64 `json:"unique,omitempty"`
	// Super stands for Unique on older kernels: a number of the mounted superblock
	// that is never given again. Two mounts of one superblock have the same, so one
	// that takes the other's ID is taken for it: what was known of the filesystem is
	// still true then, as it was mounted all the time.
	Super uint64 `json:"super,omitempty"`
	// ID is the mount's number in mountinfo.
	ID int `json:"id,omitempty"`

	FSType string `json:"fstype,omitempty"`
	Root   string `json:"root,omitempty"` // of the mount within the filesystem
	UUID   string `json:"uuid,omitempty"` // of the filesystem; it takes a disk to read it, so Identify does not
	// Number is the filesystem's dev_t in mountinfo.
	Number uint64 `json:"number,omitempty"`
	// Devices are the disks that the filesystem lies on, by their numbers.
	Devices []Device `json:"devices,omitempty"`
	// Source is the name that a filesystem without a disk was mounted by.
	Source string `json:"source,omitempty"`

	folder string // the superblock's in sysfs, of which Super is the inode; "" where it was not looked for
}

// Device is a block device. Its number goes to another disk when it has left; the
// diskseq of Linux 5.15 never does (Documentation/ABI/stable/sysfs-block). Seq is 0
// where it is not known.
type Device struct {
	Number uint64 `json:"number"`
	Seq    uint64 `json:"diskseq,omitempty"`
}

// Same reports whether two devices are one, as far as both are known.
func (d Device) Same(o Device) bool {
	return d.Number == o.Number && agree(d.Seq, o.Seq)
}

// Same reports whether two identities are of one mount, as far as both know: that is
// symmetric, and not transitive.
func (i Identity) Same(o Identity) bool {
	return agree(i.Unique, o.Unique) && agree(i.Super, o.Super) && agree(i.ID, o.ID) &&
		agree(i.FSType, o.FSType) && agree(i.Root, o.Root) && agree(i.UUID, o.UUID) &&
		agree(i.Number, o.Number) && agree(i.Source, o.Source) && sameDevices(i.Devices, o.Devices)
}

// IsMount reports whether enough is known to tell one mount from others: without that
// Same says only that nothing speaks against it.
func (i Identity) IsMount() bool { return i.Unique != 0 || i.ID != 0 && i.FSType != "" }

// Filesystem is the identity without what the kernel makes up for each mount: any mount
// of the same part of the same filesystem on the same disks has it.
func (i Identity) Filesystem() Identity {
	i.Unique, i.Super, i.ID = 0, 0, 0
	if unix.Major(i.Number) == 0 {
		i.Number = 0 // made up for this mount as well
	}
	return i
}

func agree[T comparable](a, b T) bool {
	var unknown T
	return a == unknown || b == unknown || a == b
}

// sameDevices compares sets, in any order.
func sameDevices(a, b []Device) bool {
	if len(a) == 0 || len(b) == 0 {
		return true
	}
	of := func(one Device, all []Device) bool { return slices.ContainsFunc(all, one.Same) }
	all := func(some, others []Device) bool {
		return !slices.ContainsFunc(some, func(d Device) bool { return !of(d, others) })
	}
	return len(a) == len(b) && all(a, b) && all(b, a)
}
