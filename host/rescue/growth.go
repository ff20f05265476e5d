package rescue

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

const (
	// maxAsked is how many groups are looked at. Secondary superblocks are written
	// from group 1 on: who has many groups has the size in the first of them too.
	maxAsked = 4096
	// maxStarts is how many sizes recovery is begun with, each by a VM of its own.
	maxStarts = 8
)

// growth is one that the log of an xfs holds and its primary superblock lacks.
type growth struct {
	primary superblock // as it is on the disk
	proven  superblock // with the size that is proven
	group   uint64     // whose superblock that is
	// starts are the sizes to begin recovery with, larger ones later, the proven
	// one last.
	starts []extent
}

// extent is the size of an xfs: its groups, and the blocks in all of them.
type extent struct{ groups, blocks uint64 }

// sector returns the primary superblock with another size.
func (g growth) sector(size extent) []byte {
	sector := bytes.Clone(g.primary.sector)
	binary.BigEndian.PutUint64(sector[xfsBlocks:], size.blocks)
	binary.BigEndian.PutUint32(sector[xfsGroups:], uint32(size.groups))
	binary.LittleEndian.PutUint32(sector[xfsCRC:], checksum(sector, xfsCRC))
	return sector
}

// provenGrowth returns what the primary superblock of an xfs lacks, or why there is
// no proof of anything.
//
// The proof is the superblock of an old group, one of 1 to sb_agcount-1 as the
// primary one counts. xfs_growfs_data_private (fs/xfs/xfs_fsops.c) writes the headers
// of the new groups first, with the new size in their superblocks. Then it commits
// the growth to the log, synchronously, and the log's flush makes those headers
// durable before the commit. Only after that does xfs_growfs_data write the new size
// into all secondary superblocks (xfs_update_secondary_sbs, fs/xfs/libxfs/xfs_sb.c).
// So an old group with a larger size says that the growth is in the log, and that
// what it added is formatted. Recovery ends with this size, or a later growth's, once
// it gets through to the superblock in the log, whatever size up to there it begins
// with. A new group's superblock says that a growth had begun, and proves nothing.
//
// A kernel can also shrink an xfs, by less than a group, and then the old groups have
// the larger size for a moment. No harm comes of it: as long as the log has the
// smaller size recovery ends with that, whatever it begins with. When it no longer
// does, nothing of it leads beyond the smaller size either. Where the kernel's
// words may still mean that (mayLeadBeyond), it has found some other damage, which a
// larger size does not cure: the mount fails once more, and the superblock is put back.
func provenGrowth(ctx context.Context, disk io.ReaderAt, diskBytes uint64) (growth, error) {
	primary, err := readPrimary(disk)
	if err != nil {
		return growth{}, err
	}
	if primary.bytes() > diskBytes {
		return growth{}, fmt.Errorf("its superblock has %d bytes already, and the disk only %d", primary.bytes(), diskBytes)
	}
	group, proven, err := primary.largest(ctx, disk)
	if err != nil {
		return growth{}, err
	}
	if proven.bytes() > diskBytes {
		return growth{}, fmt.Errorf("it was grown to %d bytes, as the superblock of group %d has it, and the disk has only %d", proven.bytes(), group, diskBytes)
	}
	if _, err := primary.ofGroup(disk, proven.groups-1); err != nil {
		return growth{}, fmt.Errorf("it was grown to %d bytes, as the superblock of group %d has it, but of the last group: %w", proven.bytes(), group, err)
	}
	g := growth{primary: primary, proven: proven, group: group}
	g.starts, err = primary.startsBelow(ctx, disk, proven)
	return g, err
}

// largest returns the old group whose superblock has the largest size, larger than
// the primary one's: the last growth's, where one came after another.
func (s superblock) largest(ctx context.Context, disk io.ReaderAt) (group uint64, largest superblock, err error) {
	if s.groups == 1 {
		return 0, superblock{}, errors.New("it has one group, and so no other superblock that could prove a growth")
	}
	var unread error
	largest = s
	for g := uint64(1); g < min(s.groups, maxAsked); g++ {
		if ctx.Err() != nil {
			return 0, superblock{}, context.Cause(ctx)
		}
		other, err := s.ofGroup(disk, g)
		if err != nil && unread == nil {
			unread = err
		}
		if err == nil && other.blocks > largest.blocks {
			group, largest = g, other
		}
	}
	switch {
	case group != 0:
		return group, largest, nil
	case unread != nil:
		return 0, superblock{}, fmt.Errorf("nothing proves that it was grown: %w", unread)
	default:
		return 0, superblock{}, fmt.Errorf("nothing proves that it was grown: no superblock of its %d groups has more than the %d bytes of the primary one", s.groups, s.bytes())
	}
}

// startsBelow returns the sizes to begin recovery with, up to the proven one.
//
// That one itself would do for Linux 6.1. Since "xfs: AGF length has never been bounds
// checked" (2023) a kernel lets no group but the last be short, and a group that was
// the last between two growths is short in the log until it comes to the second one.
// The log begins between some two: the size there is the right one to begin with, and
// from there the kernel follows the log. It is not written anywhere, but the groups
// that were the last have left their mark, as growfs has written them short. Each is
// taken whole, for it may have been grown by more than one growth. A wrong one among
// them costs an attempt: recovery leads beyond it, and the next is tried.
func (s superblock) startsBelow(ctx context.Context, disk io.ReaderAt, proven superblock) (starts []extent, err error) {
	whole := s.groupBytes / s.blockBytes
	for g := s.groups - 1; g < min(proven.groups-1, s.groups+maxAsked) && len(starts) < maxStarts-1; g++ {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if short, err := s.isShort(disk, g); err != nil {
			return nil, err
		} else if short {
			starts = append(starts, extent{g + 1, (g + 1) * whole})
		}
	}
	return append(starts, extent{proven.groups, proven.blocks}), nil
}

// Fields of struct xfs_agf (fs/xfs/libxfs/xfs_format.h), in the second sector of a group.
const (
	agfMagic  = "XAGF"
	agfNumber = 8
	agfLength = 12
	agfCRC    = 216
)

// isShort reports whether a group has fewer blocks than its place.
func (s superblock) isShort(disk io.ReaderAt, group uint64) (bool, error) {
	sector := make([]byte, len(s.sector))
	if _, err := disk.ReadAt(sector, int64(group*s.groupBytes)+int64(len(sector))); err != nil {
		return false, fmt.Errorf("read the header of group %d: %w", group, err)
	}
	if !has(sector, 0, agfMagic) || checksum(sector, agfCRC) != binary.LittleEndian.Uint32(sector[agfCRC:]) ||
		uint64(binary.BigEndian.Uint32(sector[agfNumber:])) != group {
		return false, nil
	}
	return uint64(binary.BigEndian.Uint32(sector[agfLength:])) < s.groupBytes/s.blockBytes, nil
}
