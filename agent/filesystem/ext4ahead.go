package filesystem

import (
	"fmt"
	"io"
)

// aheadBytes is the length of one read of readAhead.
const aheadBytes = 128 << 10

// readAhead reads the part of a disk that the kernel reads in a growth between two sizes in blocks:
// the bitmaps of the new groups, of which it wants the checksums, and what lies before them
// (ext4_alloc_group_tables and ext4_set_bitmap_checksums in fs/ext4/resize.c). If one of these
// reads fails, the kernel (6.1) has changed the resize inode already, and leaves it with blocks
// beyond the filesystem's end, which e2fsck -p does not repair. So they are read before the kernel
// begins, and through the cache in which it then finds them.
func (s ext4Super) readAhead(disk io.ReaderAt, from, to uint64) error {
	if !s.checksums || to <= from || from < s.firstBlock {
		return nil
	}
	var page [aheadBytes]byte
	last := (to - 1 - s.firstBlock) / s.blocksPerGroup
	for group := ceil(from-s.firstBlock, s.blocksPerGroup); group <= last; {
		// The kernel adds the groups of one flex group at once, with all bitmaps in the first of
		// them.
		next := min((group/s.flexGroups+1)*s.flexGroups, last+1)
		blocks := 1 + 2*(next-group)
		if s.hasCopy(group) {
			blocks += s.descriptors
		}
		at := s.firstBlock + group*s.blocksPerGroup
		end := min(at+blocks, to) * s.blockSize
		for at *= s.blockSize; at < end; at += aheadBytes {
			if _, err := disk.ReadAt(page[:min(aheadBytes, end-at)], int64(at)); err != nil {
				return fmt.Errorf("read its new part at %d: %w", at, err)
			}
		}
		group = next
	}
	return nil
}

// hasCopy reports whether a group begins with a copy of the superblock and of the group descriptors
// (ext4_bg_has_super in fs/ext4/balloc.c).
func (s ext4Super) hasCopy(group uint64) bool {
	if !s.sparse || group <= 1 {
		return true
	}
	for _, base := range []uint64{3, 5, 7} {
		power := base
		for power < group {
			power *= base
		}
		if power == group {
			return true
		}
	}
	return false
}
