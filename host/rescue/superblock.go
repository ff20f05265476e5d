package rescue

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// More fields of struct xfs_dsb (fs/xfs/libxfs/xfs_format.h): see identify.go.
const (
	xfsBlockSize   = 4
	xfsBlocks      = 8 // sb_dblocks
	xfsGroupBlocks = 84
	xfsGroups      = 88
	xfsVersion     = 100
	xfsSectorSize  = 102
	xfsInProgress  = 126
	xfsCRC         = 224 // little endian; computed over the sector with this field zero
	xfsSuperEnd    = 264
)

const (
	xfsVersionMask  = 0xf
	xfsVersion5     = 5
	xfsMinSector    = 512
	xfsMaxSector    = 32 << 10
	xfsMinBlock     = 512
	xfsMaxBlock     = 64 << 10
	xfsMinGroup     = 16 << 20 // XFS_MIN_AG_BYTES
	xfsMaxGroup     = 1 << 40  // XFS_MAX_AG_BYTES
	xfsMinLastGroup = 64       // XFS_MIN_AG_BLOCKS
	// Bits of sb_versionnum that a mount or the first extended attribute may set.
	xfsVersionMoving = 0x10 | 0x40
)

// superblock is a superblock of an xfs of version 5. Each allocation group begins with one. Its
// numbers are consistent: the filesystem's size and each group's position fit into 63 bits.
type superblock struct {
	sector     []byte // the whole sector
	blocks     uint64 // of the whole filesystem
	groups     uint64
	blockBytes uint64
	groupBytes uint64
}

// bytes returns the filesystem's size in bytes.
func (s superblock) bytes() uint64 { return s.blocks * s.blockBytes }

// parseSuperblock parses an untrusted superblock at the beginning of head.
func parseSuperblock(head []byte) (superblock, error) {
	if len(head) < xfsMinSector || !has(head, 0, xfsMagic) {
		return superblock{}, errors.New("is not a superblock of an xfs")
	}
	be := binary.BigEndian
	if v := be.Uint16(head[xfsVersion:]) & xfsVersionMask; v != xfsVersion5 {
		return superblock{}, fmt.Errorf("has version %d, and no checksum: want version %d", v, xfsVersion5)
	}
	sector := int(be.Uint16(head[xfsSectorSize:]))
	if sector < xfsMinSector || sector > min(xfsMaxSector, len(head)) || sector&(sector-1) != 0 {
		return superblock{}, fmt.Errorf("has sectors of %d bytes", sector)
	}
	head = head[:sector:sector]
	if checksum(head, xfsCRC) != binary.LittleEndian.Uint32(head[xfsCRC:]) {
		return superblock{}, errors.New("has a wrong checksum")
	}
	s := superblock{
		sector:     head,
		blocks:     be.Uint64(head[xfsBlocks:]),
		groups:     uint64(be.Uint32(head[xfsGroups:])),
		blockBytes: uint64(be.Uint32(head[xfsBlockSize:])),
	}
	if b := s.blockBytes; b < xfsMinBlock || b > xfsMaxBlock || b&(b-1) != 0 {
		return superblock{}, fmt.Errorf("has blocks of %d bytes", b)
	}
	group := uint64(be.Uint32(head[xfsGroupBlocks:]))
	s.groupBytes = group * s.blockBytes
	if s.groupBytes < xfsMinGroup || s.groupBytes > xfsMaxGroup || s.groups == 0 || s.groups > (1<<62)/s.groupBytes ||
		s.blocks > s.groups*group || s.blocks < (s.groups-1)*group+xfsMinLastGroup {
		return superblock{}, fmt.Errorf("has %d blocks in %d groups of %d", s.blocks, s.groups, group)
	}
	return s, nil
}

// checksum returns the CRC32C of a sector as the kernel computes it: with zeros in place of the
// checksum.
func checksum(sector []byte, at int) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	sum := crc32.Update(0, table, sector[:at])
	sum = crc32.Update(sum, table, make([]byte, 4))
	return crc32.Update(sum, table, sector[at+4:])
}

// xfsStays are the fields that never change while a filesystem is mounted, and that mkfs writes
// into every superblock.
var xfsStays = []struct {
	from, to int
	name     string
}{
	{xfsBlockSize, 8, "block size"},
	{xfsRealtime, 32, "realtime section"},
	{32, 48, "UUID"},
	{xfsLogStart, 56, "log's place"},
	{80, 84, "realtime extents"},
	{xfsGroupBlocks, 88, "group size"},
	{92, 96, "realtime bitmap"},
	{96, 100, "log's length"},
	{xfsSectorSize, 108, "sector or inode size"},
	{120, 126, "sizes' logarithms"},
	{180, 184, "inode alignment"},
	{192, 200, "directory block or log geometry"},
	{208, 220, "features"},
	{228, 232, "inode alignment"},
	{248, xfsSuperEnd, "metadata UUID"},
}

// same returns nil if two superblocks belong to one filesystem, even if their sizes differ.
func (s superblock) same(as superblock) error {
	for _, f := range xfsStays {
		if !bytes.Equal(s.sector[f.from:f.to], as.sector[f.from:f.to]) {
			return fmt.Errorf("has another %s than the primary one", f.name)
		}
	}
	version := func(s superblock) uint16 { return binary.BigEndian.Uint16(s.sector[xfsVersion:]) &^ xfsVersionMoving }
	if version(s) != version(as) {
		return errors.New("has another version than the primary one")
	}
	return nil
}

// readPrimary reads the superblock with which a mount begins.
func readPrimary(disk io.ReaderAt) (superblock, error) {
	head := make([]byte, xfsMaxSector)
	n, err := disk.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return superblock{}, fmt.Errorf("read its superblock: %w", err)
	}
	s, err := parseSuperblock(head[:n])
	if err == nil && s.sector[xfsInProgress] != 0 { // mkfs leaves this flag set in the other superblocks
		err = errors.New("is of an xfs that mkfs has not finished")
	}
	if err != nil {
		return superblock{}, fmt.Errorf("its primary superblock %w", err)
	}
	return s, nil
}

// ofGroup reads the superblock of a group, and refuses a superblock of another filesystem.
func (s superblock) ofGroup(disk io.ReaderAt, group uint64) (superblock, error) {
	sector := make([]byte, len(s.sector))
	_, err := disk.ReadAt(sector, int64(group*s.groupBytes))
	if errors.Is(err, io.EOF) {
		return superblock{}, fmt.Errorf("the superblock of group %d would lie beyond the disk's end", group)
	}
	if err != nil {
		return superblock{}, fmt.Errorf("read the superblock of group %d: %w", group, err)
	}
	other, err := parseSuperblock(sector)
	if err == nil {
		err = other.same(s)
	}
	if err != nil {
		return superblock{}, fmt.Errorf("the superblock of group %d %w", group, err)
	}
	return other, nil
}
