package filesystem

import (
	"math"
	"unsafe"
)

// ioctlTrim is FITRIM of linux/fs.h.
const ioctlTrim = 0xc0185879

// trimRange is struct fstrim_range of linux/fs.h, in bytes. The kernel replaces Length by the
// number of bytes that it has discarded.
type trimRange struct{ Start, Length, Least uint64 }

// trimStep is the length of a range that Trim works on, in bytes, unless an allocation group is
// longer.
const trimStep = 1 << 30

// Trim discards the free blocks of a range that begins at from, in bytes, and leaves out free
// ranges that are shorter than least. It returns how many bytes the disk was told of, and where the
// next range begins: the caller begins at 0 and continues there until that is g's end.
//
// A range has whole allocation groups, because an xfs discards each free extent that a range
// touches, also outside of the range (xfs_trim_extents in fs/xfs/xfs_discard.c of Linux 6.1). An
// ext4 skips a group that it has trimmed since blocks were last freed in it; its groups of 4 KiB
// blocks do not cross a range's end, either.
//
// A btrfs has one range, whatever g and from are. The kernel compares a range with the filesystem's
// own addresses, which are not those of the disk, and discards the space that no block group has in
// each call (btrfs_trim_fs in fs/btrfs/extent-tree.c).
func (t Type) Trim(m Mounted, g Geometry, from, least uint64) (trimmed, next uint64, err error) {
	r := trimRange{Start: from, Length: trimBytes(g), Least: least}
	next = min(from+r.Length, g.Bytes())
	if t.TrimsWhole {
		r.Start, r.Length, next = 0, math.MaxUint64, g.Bytes()
	}
	if err := ioctl(m, "FITRIM", ioctlTrim, unsafe.Pointer(&r)); err != nil {
		return 0, from, err
	}
	return r.Length, next, nil
}

// trimBytes returns the length of a range.
func trimBytes(g Geometry) uint64 {
	group := g.GroupBlocks * g.BlockSize
	if group == 0 {
		return trimStep
	}
	return max(group, trimStep/group*group)
}
