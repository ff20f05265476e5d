package mount

import (
	"slices"

	"golang.org/x/sys/unix"
)

// Identity distinguishes a mount from every other mount of the same boot, including later ones with
// the same number, mount point or disk name. A zero field is unknown and is not compared: an
// Identity with few fields stands for all mounts that have them.
//
// No single property is proof. A mount's number is reused at once (seen: 103, unmounted, mounted,
// 103), and a disk's dev_t is reused for the next disk. xfs returns nothing but the dev_t from
// statfs. A clone has the UUID of its original, and btrfs returns a number from stat that no disk
// has.
type Identity struct {
	// Unique is the kernel's number of the mount that is never reused (since Linux 6.8).
	Unique uint64 `json:"unique,omitempty"`
	// Super replaces Unique on older kernels: a number of the mounted superblock that is never
	// reused. Two mounts of one superblock have the same number, so a mount that reuses the other's
	// ID is taken for it. That is harmless: what was known of the filesystem is still true, as it
	// was mounted all the time.
	Super uint64 `json:"super,omitempty"`
	// ID is the mount's number in mountinfo.
	ID int `json:"id,omitempty"`

	FSType string `json:"fstype,omitempty"`
	Root   string `json:"root,omitempty"` // root of the mount within the filesystem
	UUID   string `json:"uuid,omitempty"` // of the filesystem; Identify leaves it empty, because reading it needs the disk
	// Number is the filesystem's dev_t in mountinfo.
	Number uint64 `json:"number,omitempty"`
	// Devices are the disks of the filesystem, sorted by number.
	Devices []Device `json:"devices,omitempty"`
	// Source is the source with which a filesystem without a disk was mounted.
	Source string `json:"source,omitempty"`

	folder string // the superblock's directory in sysfs, whose inode number is Super; "" if not determined
}

// Device is a block device. Its number is reused for another disk after it has left; the diskseq of
// Linux 5.15 is never reused (Documentation/ABI/stable/sysfs-block). Seq is 0 if it is not known.
type Device struct {
	Number uint64 `json:"number"`
	Seq    uint64 `json:"diskseq,omitempty"`
}

// Same reports whether two devices are the same, as far as both are known.
func (d Device) Same(o Device) bool {
	return d.Number == o.Number && agree(d.Seq, o.Seq)
}

// Same reports whether two identities belong to the same mount, as far as both are known. It is
// symmetric but not transitive.
func (i Identity) Same(o Identity) bool {
	return agree(i.Unique, o.Unique) && agree(i.Super, o.Super) && agree(i.ID, o.ID) &&
		agree(i.FSType, o.FSType) && agree(i.Root, o.Root) && agree(i.UUID, o.UUID) &&
		agree(i.Number, o.Number) && agree(i.Source, o.Source) && sameDevices(i.Devices, o.Devices)
}

// IsMount reports whether the identity has enough fields to distinguish one mount from others. If
// not, a true result of Same only means that no known field differs.
func (i Identity) IsMount() bool { return i.Unique != 0 || i.ID != 0 && i.FSType != "" }

// Filesystem returns the identity without the values that the kernel assigns to each mount. All
// mounts of the same part of the same filesystem on the same disks have the same result.
func (i Identity) Filesystem() Identity {
	i.Unique, i.Super, i.ID = 0, 0, 0
	if unix.Major(i.Number) == 0 {
		i.Number = 0 // assigned to this mount, too
	}
	return i
}

func agree[T comparable](a, b T) bool {
	var unknown T
	return a == unknown || b == unknown || a == b
}

// sameDevices compares two sets, in any order.
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
