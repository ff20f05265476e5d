package filesystem

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// ext4 grows by EXT4_IOC_RESIZE_FS (Documentation/filesystems/ext4), which requires
// CAP_SYS_RESOURCE and refuses a filesystem with recorded errors. The ioctl writes the journal back
// before it returns, so that a growth which the agent has reported is on the disk (ext4_ioctl in
// fs/ext4/ioctl.c).
//
// An interrupted growth is in the journal. The kernel counts the groups before it replays the
// journal, so the next growth would damage the filesystem unless the filesystem is mounted a second
// time first (EndOnDisk).
var ext4 = extType("ext4", ext4EndOnDisk)

// ext3 is served by the driver of ext4, as a filesystem without the features that came later. So it
// grows in the same way, to 2^32 blocks at most.
var ext3 = extType("ext3", ext3EndOnDisk)

// extType returns the type that mount(2) calls name.
func extType(name string, endOnDisk func(*os.File) (uint64, error)) Type {
	return Type{
		Name: name, Geometry: ext4Geometry, Goal: func(_ Geometry, blocks, _ uint64) uint64 { return blocks },
		OnDisk:         func(disk *os.File) (Geometry, error) { return ext4Geometry(Mounted{Disk: disk}) },
		CanGrow:        func(m Mounted, blocks uint64) error { return ext4CanGrow(name, m, blocks) },
		Grow:           func(ctx context.Context, m Mounted, blocks uint64) error { return ext4Grow(ctx, name, m, blocks) },
		Settle:         func(context.Context, Mounted) error { return nil },
		RecordedErrors: ext4RecordedErrors, EndOnDisk: endOnDisk, Options: ext4Options, BeforeMount: func() {}, Checkpoint: ext4Checkpoint, MountRefused: ext4MountRefused, UUID: ext4UUID,
		Faults: Faults{Repair: "e2fsck -p", StopsReadOnly: true},
	}
}

const (
	ext4IocResizeFS = 0x40086610 // _IOW('f', 16, __u64): the new count of blocks

	// ext4StepBytes is the most that one call grows by: the ioctl cannot be interrupted and takes
	// about 15 ms per GiB on a slow machine.
	ext4StepBytes = 16 << 30
)

// ext4Super has the fields of struct ext4_super_block (fs/ext4/ext4.h) that are used. The
// superblock starts 1024 bytes into the device.
type ext4Super struct {
	blocks         uint64
	blockSize      uint64
	clusterBlocks  uint64 // blocks per cluster, 1 without bigalloc
	blocksPerGroup uint64
	firstBlock     uint64 // of the first group: 1 if blocks have 1 KiB, else 0
	inodeTable     uint64 // blocks of a group's inode table
	descriptors    uint64 // blocks of group descriptors, including the reserved ones
	inodesPerGroup uint64
	wide           bool   // 64bit: more than 2^32 blocks
	flexGroups     uint64 // groups that have their bitmaps together; 1 without flex_bg
	checksums      bool   // metadata_csum
	sparse         bool   // sparse_super: only some groups have a copy of the superblock
	sparseSuper2   bool   // the kernel does not grow a filesystem with this feature
	isExt3         bool   // it has a journal, and no feature that ext3 does not have
	errors         bool   // the state has EXT4_ERROR_FS
	panics         bool   // s_errors: an error makes the kernel panic
	errorCount     uint32
	uuid           [16]byte
}

const (
	ext4SuperOffset   = 1024
	ext4SuperSize     = 1024
	ext4Magic         = 0xef53
	ext4ErrorFS       = 0x2
	ext4ErrorsPanic   = 3
	ext4JournalDevice = 0x8   // INCOMPAT_JOURNAL_DEV
	ext4Feature64     = 0x80  // INCOMPAT_64BIT
	ext4SparseV2      = 0x200 // COMPAT_SPARSE_SUPER2
	ext4Flex          = 0x200 // INCOMPAT_FLEX_BG
	ext4Sparse        = 0x1   // RO_COMPAT_SPARSE_SUPER
	ext4Checksums     = 0x400 // RO_COMPAT_METADATA_CSUM

	// The features of ext3 (fs/ext4/ext4.h): COMPAT_HAS_JOURNAL, EXT3_FEATURE_INCOMPAT_SUPP and
	// EXT3_FEATURE_RO_COMPAT_SUPP.
	ext3Journal  = 0x4
	ext3Incompat = 0x2 | 0x4 | 0x10
	ext3ROCompat = 0x1 | 0x2 | 0x4
)

// parseExt4Super parses an untrusted superblock.
func parseExt4Super(b []byte) (ext4Super, error) {
	if len(b) < ext4SuperSize {
		return ext4Super{}, fmt.Errorf("ext4 superblock: %d bytes of %d", len(b), ext4SuperSize)
	}
	u16 := func(at int) uint64 { return uint64(binary.LittleEndian.Uint16(b[at:])) }
	u32 := func(at int) uint64 { return uint64(binary.LittleEndian.Uint32(b[at:])) }
	if u16(0x38) != ext4Magic {
		return ext4Super{}, fmt.Errorf("ext4 superblock: magic %#x, not %#x", u16(0x38), ext4Magic)
	}
	if u32(0x60)&ext4JournalDevice != 0 {
		return ext4Super{}, errors.New("ext4 superblock: it belongs to another ext4's external journal")
	}
	logBlock, logCluster := u32(0x18), u32(0x1c)
	if logBlock > 6 || logCluster < logBlock || logCluster > 20 {
		return ext4Super{}, fmt.Errorf("ext4 superblock: block size 2^(10+%d), cluster size 2^(10+%d)", logBlock, logCluster)
	}
	s := ext4Super{
		blocks:         u32(0x04),
		blockSize:      1024 << logBlock,
		clusterBlocks:  1 << (logCluster - logBlock),
		blocksPerGroup: u32(0x20),
		firstBlock:     u32(0x14),
		inodesPerGroup: u32(0x28),
		wide:           u32(0x60)&ext4Feature64 != 0,
		sparseSuper2:   u32(0x5c)&ext4SparseV2 != 0,
		isExt3:         u32(0x5c)&ext3Journal != 0 && u32(0x60)&^ext3Incompat == 0 && u32(0x64)&^ext3ROCompat == 0,
		errors:         u16(0x3a)&ext4ErrorFS != 0,
		panics:         u16(0x3c) == ext4ErrorsPanic,
		errorCount:     uint32(u32(0x194)),
		uuid:           [16]byte(b[0x68:0x78]),
	}
	s.flexGroups, s.checksums, s.sparse = 1, u32(0x64)&ext4Checksums != 0, u32(0x64)&ext4Sparse != 0
	if log := b[0x174]; u32(0x60)&ext4Flex != 0 && log < 32 {
		s.flexGroups = 1 << log
	}
	descriptor := uint64(32)
	if s.wide {
		s.blocks |= u32(0x150) << 32
		descriptor = u16(0xfe)
	}
	if s.blocksPerGroup == 0 || s.blocks == 0 || s.firstBlock > 1 || descriptor < 32 || descriptor > s.blockSize || s.blocks > (1<<63)/s.blockSize {
		return ext4Super{}, fmt.Errorf("ext4 superblock: %d blocks, %d a group, descriptors of %d bytes", s.blocks, s.blocksPerGroup, descriptor)
	}
	s.inodeTable = ceil(u32(0x28)*u16(0x58), s.blockSize)
	s.descriptors = ceil(ceil(s.blocks, s.blocksPerGroup)*descriptor, s.blockSize) + u16(0xce)
	return s, nil
}

func ceil(n, by uint64) uint64 { return n/by + min(n%by, 1) }

// slack returns the size that a last group must exceed for the kernel to create it. The kernel
// leaves out a group that could not hold its own metadata (ext4_resize_fs).
func (s ext4Super) slack() uint64 {
	return 1 + s.descriptors + 2 + s.inodeTable + s.clusterBlocks
}

// readExt4Super reads through the block device's page cache, which is where a mounted ext4 keeps
// its superblock.
func readExt4Super(disk *os.File) (ext4Super, error) {
	var b [ext4SuperSize]byte
	if _, err := disk.ReadAt(b[:], ext4SuperOffset); err != nil {
		return ext4Super{}, fmt.Errorf("ext4 superblock: %w", err)
	}
	s, err := parseExt4Super(b[:])
	if err != nil {
		return ext4Super{}, fmt.Errorf("%s: %w", disk.Name(), err)
	}
	return s, nil
}

func ext4Geometry(m Mounted) (Geometry, error) {
	s, err := readExt4Super(m.Disk)
	if err != nil {
		return Geometry{}, err
	}
	return Geometry{BlockSize: s.blockSize, Blocks: s.blocks, Slack: s.slack()}, nil
}

// ext4CanGrow refuses growths that the kernel would refuse only in the middle, or only after the
// device has grown.
func ext4CanGrow(name string, m Mounted, blocks uint64) error {
	s, err := readExt4Super(m.Disk)
	if err != nil {
		return err
	}
	return s.canGrow(name, m.Disk.Name(), blocks)
}

func (s ext4Super) canGrow(name, device string, blocks uint64) error {
	if blocks <= s.blocks {
		return nil
	}
	refuse := func(format string, args ...any) error {
		return errkind.New(errkind.FailedPrecondition, "%s on %s: "+format, append([]any{name, device}, args...)...)
	}
	switch groups := ceil(blocks-min(blocks, s.firstBlock), s.blocksPerGroup); {
	case s.sparseSuper2:
		return refuse("the kernel does not grow an ext4 with the sparse_super2 feature: unmount it and run resize2fs on the detached disk")
	// The kernel does not refuse these at the start, and fails in the middle.
	case s.isExt3 && blocks > math.MaxUint32:
		return refuse("it is limited to 2^32 blocks of %d bytes: make an ext4 of it on the detached disk: tune2fs -O extents, e2fsck -f, resize2fs -b", s.blockSize)
	case !s.wide && blocks > math.MaxUint32:
		return refuse("without the 64bit feature it is limited to 2^32 blocks of %d bytes: convert it offline with resize2fs -b", s.blockSize)
	case s.inodesPerGroup > 0 && groups > math.MaxUint32/s.inodesPerGroup:
		return refuse("%d bytes would need more than 2^32 inodes: it is limited to %d groups of %d bytes", blocks*s.blockSize, math.MaxUint32/s.inodesPerGroup, s.blocksPerGroup*s.blockSize)
	}
	return nil
}

func ext4EndOnDisk(disk *os.File) (uint64, error) {
	s, err := readExt4Super(disk)
	return s.blocks, err
}

// ext3EndOnDisk refuses a superblock that only ext4 mounts (ext3_feature_set_ok in
// fs/ext4/super.c).
func ext3EndOnDisk(disk *os.File) (uint64, error) {
	s, err := readExt4Super(disk)
	if err == nil && !s.isExt3 {
		err = errors.New("ext4 superblock: it has a feature that ext3 does not have, or no journal")
	}
	return s.blocks, err
}

func ext4UUID(disk *os.File) (string, error) {
	s, err := readExt4Super(disk)
	return textOf(s.uuid), err
}

// ext4Options returns an option that overrides a superblock which asks for a panic after an error
// (tune2fs -e panic), because a volume must not end the VM.
func ext4Options(disk *os.File) string {
	if s, err := readExt4Super(disk); err != nil || !s.panics {
		return ""
	}
	return "errors=remount-ro"
}

func ext4MountRefused(disk *os.File, err error) string {
	switch {
	case errors.Is(err, unix.EINVAL) && isSenselessExt4(disk):
		return "its superblock is invalid: detach the disk and run on the host: e2fsck DISK, which looks for a backup superblock"
	case errors.Is(err, unix.EUCLEAN):
		// The kernel checks the group descriptors before it replays the journal. If the disk failed
		// in a growth, the kernel (6.1) has written the new size without the new descriptors. They
		// are in the journal, unless it took no writes either; e2fsck -p does not repair that.
		return "if its growth was cut off, or its disk failed in the growth, detach the disk and run on the host: directvol rescue DISK, or e2fsck -p DISK. Both replay the journal first. Only if neither is enough, because the journal took no writes either, run e2fsck -y DISK"
	case errors.Is(err, unix.ESRCH): // dquot_load_quota_sb in fs/quota/dquot.c
		return "it has quotas in a format that the guest's kernel does not support: detach the disk and run on the host: tune2fs -O ^quota DISK"
	case errors.Is(err, unix.EBADMSG):
		return "its metadata is damaged: detach the disk and run on the host: e2fsck -p DISK"
	}
	return ""
}

// isSenselessExt4 reports whether a disk has the magic number of ext4 and an invalid superblock.
func isSenselessExt4(disk *os.File) bool {
	var b [ext4SuperSize]byte
	if _, err := disk.ReadAt(b[:], ext4SuperOffset); err != nil || binary.LittleEndian.Uint16(b[0x38:]) != ext4Magic || isExt4Journal(append(make([]byte, ext4SuperOffset), b[:]...)) {
		return false
	}
	_, err := parseExt4Super(b[:])
	return err != nil
}

func ext4Grow(ctx context.Context, name string, m Mounted, blocks uint64) error {
	s, err := readExt4Super(m.Disk)
	if err != nil {
		return err
	}
	if err := s.canGrow(name, m.Disk.Name(), blocks); err != nil {
		return err
	}
	for at := s.blocks; at < blocks; {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%s on %s stopped growing at %d of %d blocks: %w", name, m.Disk.Name(), at, blocks, err)
		}
		from := at
		at = s.step(at, blocks)
		if err := s.readAhead(m.Disk, from, at); err != nil {
			return fmt.Errorf("grow %s on %s to %d blocks: %w", name, m.Disk.Name(), at, err)
		}
		err := ioctl(m, "EXT4_IOC_RESIZE_FS", ext4IocResizeFS, unsafe.Pointer(&at))
		if errors.Is(err, unix.EINVAL) { // canGrow has checked the size (reserve_backup_gdb in fs/ext4/resize.c)
			now, readErr := readExt4Super(m.Disk)
			if readErr != nil || now.blocks <= at {
				return errkind.New(errkind.FailedPrecondition, "%s on %s cannot grow to %d blocks: what it has reserved for growth is damaged, the kernel's log says more: unmount it and run e2fsck -f on the detached disk: %w", name, m.Disk.Name(), at, err)
			}
			at, err = now.blocks, nil // somebody else has grown it further, and the kernel does not shrink it
		}
		if err != nil {
			return fmt.Errorf("grow %s on %s to %d blocks: %w", name, m.Disk.Name(), at, err)
		}
		m.stepped(at)
	}
	return nil
}

// step returns where the next call ends: at the end of a whole group, so that no step leaves a
// short group in the middle, or at goal.
func (s ext4Super) step(at, goal uint64) uint64 {
	next := at + ext4StepBytes/s.blockSize
	next -= (next - s.firstBlock) % s.blocksPerGroup
	if next <= at || next >= goal {
		return goal
	}
	return next
}

// ext4RecordedErrors reads the superblock and not errors_count in sysfs. The kernel also refuses to
// grow a filesystem with only the error flag of the state set, and errors_count does not show that
// flag.
func ext4RecordedErrors(disk *os.File) (uint64, error) {
	s, err := readExt4Super(disk)
	if err != nil {
		return 0, err
	}
	count := uint64(s.errorCount)
	if s.errors {
		count = max(count, 1)
	}
	return count, nil
}
