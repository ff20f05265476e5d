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
	// maxAsked is how many groups' superblocks are read. A growth writes the secondary superblocks
	// from group 1 on, so the first groups have the new size even if there are many.
	maxAsked = 4096
	// maxStarts is how many sizes are tried for recovery to begin with, each in a VM of its own.
	maxStarts = 8
)

// growth is a growth that is in the log of an xfs but not in its primary superblock.
type growth struct {
	primary superblock // as it is on the disk
	proven  superblock // has the proven size
	group   uint64     // the group of that superblock
	// starts are the sizes with which recovery may begin, in increasing order. The last one is the
	// proven size.
	starts []extent
}

// extent is the size of an xfs: its number of groups, and the number of blocks in all of them.
type extent struct{ groups, blocks uint64 }

// sector returns the primary superblock with another size.
func (g growth) sector(size extent) []byte {
	sector := bytes.Clone(g.primary.sector)
	binary.BigEndian.PutUint64(sector[xfsBlocks:], size.blocks)
	binary.BigEndian.PutUint32(sector[xfsGroups:], uint32(size.groups))
	binary.LittleEndian.PutUint32(sector[xfsCRC:], checksum(sector, xfsCRC))
	return sector
}

// provenGrowth returns the growth that the primary superblock of an xfs lacks, or an error if
// nothing proves a growth.
//
// The proof is the superblock of an old group, one of the groups 1 to sb_agcount-1 according to the
// primary superblock. xfs_growfs_data_private (fs/xfs/xfs_fsops.c) first writes the headers of the
// new groups, with the new size in their superblocks. Then it commits the growth to the log,
// synchronously; the log's flush makes those headers durable before the commit. Only after that
// does xfs_growfs_data write the new size into all secondary superblocks (xfs_update_secondary_sbs,
// fs/xfs/libxfs/xfs_sb.c). So if an old group has a larger size, the growth is in the log, and the
// new space is formatted. Recovery may begin with any size up to this one: once it reaches the
// superblock in the log, it ends with this size or a later growth's. A new group's superblock only
// shows that a growth had begun, and proves nothing.
//
// A kernel can also shrink an xfs, by less than a group; the old groups then briefly have the
// larger size. A shrink does no harm. As long as the log contains the smaller size, recovery ends
// with that size, whatever size it begins with. Once the log no longer contains it, nothing in the
// log refers to space beyond the smaller size. If the kernel's messages still suggest that
// (mayLeadBeyond), the kernel has found other damage, which a larger size does not repair: the
// mount fails again, and the superblock is restored.
func provenGrowth(ctx context.Context, disk io.ReaderAt, diskBytes uint64) (growth, error) {
	primary, err := readPrimary(disk)
	if err != nil {
		return growth{}, err
	}
	if primary.bytes() > diskBytes {
		return growth{}, fmt.Errorf("its superblock already has %d bytes, but the disk only %d", primary.bytes(), diskBytes)
	}
	group, proven, err := primary.largest(ctx, disk)
	if err != nil {
		return growth{}, err
	}
	if proven.bytes() > diskBytes {
		return growth{}, fmt.Errorf("it was grown to %d bytes, according to the superblock of group %d, but the disk has only %d", proven.bytes(), group, diskBytes)
	}
	if _, err := primary.ofGroup(disk, proven.groups-1); err != nil {
		return growth{}, fmt.Errorf("it was grown to %d bytes, according to the superblock of group %d, but its last group is invalid: %w", proven.bytes(), group, err)
	}
	g := growth{primary: primary, proven: proven, group: group}
	g.starts, err = primary.startsBelow(ctx, disk, proven)
	return g, err
}

// largest returns the old group whose superblock has the largest size, and that superblock. The
// size must exceed the primary superblock's. After several growths it is the last one's.
func (s superblock) largest(ctx context.Context, disk io.ReaderAt) (group uint64, largest superblock, err error) {
	if s.groups == 1 {
		return 0, superblock{}, errors.New("it has only one group, so no second superblock can prove a growth")
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
		return 0, superblock{}, fmt.Errorf("a growth cannot be proven: %w", unread)
	default:
		return 0, superblock{}, fmt.Errorf("nothing proves that it was grown: none of its %d groups has a superblock with more than the primary one's %d bytes", s.groups, s.bytes())
	}
}

// startsBelow returns the sizes with which recovery may begin, up to the proven one.
//
// For Linux 6.1 the proven size would be enough. Since "xfs: AGF length has never been bounds
// checked" (2023), a kernel accepts only the last group as short. A group that was the last one
// between two growths is short in the log up to the second growth. The log begins between two of
// the growths. The size at that point is the right one to begin with; from there the kernel follows
// the log. No field records that size, but each group that was once the last one is recognizable,
// because growfs wrote it short. startsBelow counts each such group as whole, because more than one
// growth may have enlarged it. A wrong size costs an attempt: recovery leads beyond it, and the
// next size is tried.
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

// isShort reports whether a group has fewer blocks than the group size.
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
