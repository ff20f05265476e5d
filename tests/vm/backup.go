package vm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// ext4Super are the fields of an ext4's first superblock that tests compare (struct
// ext4_super_block, fs/ext4/ext4.h).
type ext4Super struct {
	size        uint64 // in bytes
	blockBytes  uint64
	first       uint64 // first block of the first group
	groupBlocks uint64
	described   uint64 // groups whose superblock has all group descriptors of these groups behind it
	errors      uint32 // s_error_count, the errors_count of sysfs
}

// readExt4Super reads the superblock at an offset of an image.
func readExt4Super(path string, at int64) (s ext4Super, err error) {
	image, err := os.Open(path)
	if err != nil {
		return s, err
	}
	defer image.Close()
	var raw [SuperblockBytes]byte
	if _, err := image.ReadAt(raw[:], at); err != nil {
		return s, fmt.Errorf("%s: %w", path, err)
	}
	var ok bool
	if s.size, ok = ext4Size(raw[:]); !ok {
		return s, fmt.Errorf("%s: no superblock of ext4 at %d", path, at)
	}
	s.blockBytes = 1024 << binary.LittleEndian.Uint32(raw[24:])
	s.first = uint64(binary.LittleEndian.Uint32(raw[20:]))
	s.groupBlocks = uint64(binary.LittleEndian.Uint32(raw[32:]))
	s.errors = binary.LittleEndian.Uint32(raw[0x194:])
	s.described = math.MaxUint64
	if binary.LittleEndian.Uint32(raw[96:])&hasMetaBG != 0 {
		size := uint64(32)
		if binary.LittleEndian.Uint32(raw[96:])&has64bit != 0 {
			size = max(size, uint64(binary.LittleEndian.Uint16(raw[0xfe:])))
		}
		blocks := uint64(binary.LittleEndian.Uint32(raw[0x104:]))
		if blocks > 1 {
			blocks-- // some of the last one's groups may have been added later
		}
		s.described = blocks * s.blockBytes / size
	}
	if s.groupBlocks == 0 {
		return s, fmt.Errorf("%s: its groups have no blocks", path)
	}
	return s, nil
}

// ErrorsOnDisk returns the number of errors that the kernel has recorded in an ext4's superblock.
func ErrorsOnDisk(path string) (uint32, error) {
	s, err := readExt4Super(path, SuperblockOffset("ext4"))
	return s.errors, err
}

// hasMetaBG is EXT4_FEATURE_INCOMPAT_META_BG. Groups from s_first_meta_bg on then have descriptors
// elsewhere, and the copies of the superblock in them are of no use to e2fsck -b, which looks for
// the first descriptors behind each copy (ext2fs_super_and_bgd_loc2 of e2fsprogs). The kernel sets
// the flag when it grows an ext4 that has no room for more descriptors. Behind the superblock of a
// group that it adds after that, it writes only the descriptors that it changes
// (setup_new_flex_group_blocks in fs/ext4/resize.c), also where the groups of the same block of
// descriptors have all of them.
const hasMetaBG = 0x10

// backups returns the blocks of the second and of the last superblock that e2fsck can use: groups 0
// and 1 and the powers of 3, 5 and 7 have one (ext4_bg_has_super in fs/ext4/balloc.c).
func (s ext4Super) backups() []uint64 {
	groups := (s.size/s.blockBytes - s.first + s.groupBlocks - 1) / s.groupBlocks
	groups = min(groups, s.described)
	last := uint64(1)
	for _, base := range []uint64{3, 5, 7} {
		for power := base; power < groups; power *= base {
			last = max(last, power)
		}
	}
	switch {
	case groups < 2:
		return nil
	case last == 1:
		return []uint64{s.first + s.groupBlocks}
	}
	return []uint64{s.first + s.groupBlocks, s.first + last*s.groupBlocks}
}

// stale are the findings of `e2fsck -fn -b` about an intact ext4 that was used: the kernel keeps
// neither the counts nor the bitmaps' checksums in the copies up to date, and the copies that it
// writes in a growth have the flags of a mounted ext4. Every other line but the headings of the
// passes is a failure. A deleted inode may lie where the descriptors say that no inode was ever
// used, and the copies do not know of such a part: an ext4 without a journal that was cut off keeps
// the inode of a deleted file there.
var stale = regexp.MustCompile(`^$|^Deleted inode \d+ has zero dtime\.|^e2fsck [0-9]|^Pass [1-5]|skipping journal recovery|count wrong|^(Fix|Clear)\? no$|orphan_present is set but orphan file is clean|bitmap differences:|bitmap does not match checksum|^IGNORED\.|Padding at end of|WARNING: Filesystem still has errors|: \d+/\d+ files `)

// CheckBackups shows that the second and the last superblock of an ext4, with the group descriptors
// behind them, lead e2fsck to every file: they have the size of the first superblock, and with them
// e2fsck finds nothing wrong except the counts and the bitmaps.
func CheckBackups(ctx context.Context, path string) error {
	s, err := readExt4Super(path, SuperblockOffset("ext4"))
	if err != nil {
		return err
	}
	for _, block := range s.backups() {
		backup, err := readExt4Super(path, int64(block*s.blockBytes))
		if err != nil {
			return err
		}
		if backup.size != s.size {
			return fmt.Errorf("%s: the superblock at block %d\nwant %d bytes\ngot  %d", path, block, s.size, backup.size)
		}
		said, err := e2fsck(ctx, "-fn", "-b", strconv.FormatUint(block, 10), "-B", strconv.FormatUint(s.blockBytes, 10), path)
		if err != nil && said == "" {
			return err
		}
		for line := range strings.Lines(said) {
			if !stale.MatchString(strings.TrimSpace(line)) {
				return fmt.Errorf("%s: with the superblock at block %d e2fsck says: %s", path, block, line)
			}
		}
	}
	return nil
}

// RepairAll makes e2fsck repair everything in an ext4 image that it can, also where e2fsck -p
// leaves the decision to its user.
func RepairAll(ctx context.Context, image string) error {
	_, err := e2fsck(ctx, "-fy", image)
	return err
}

func e2fsck(ctx context.Context, arguments ...string) (said string, err error) {
	cmd := exec.CommandContext(ctx, "e2fsck", arguments...)
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 1 { // it has repaired something
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("%v: %w\n%.4096s", cmd.Args, err, out)
	}
	return string(out), err
}
