package rescue

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// found is the filesystem on a disk, as identified by the disk's first bytes.
type found struct {
	fstype string // ext4 or xfs
	// replays is true if the superblock says that the journal must be replayed. Only ext4's
	// superblock does.
	replays bool
	// erred is true if the superblock records an error. Only ext4's superblock does.
	erred bool
}

// headBytes is how much of a disk identify reads. All signatures below lie within it.
const headBytes = 68 << 10

// Superblocks: the first fields of struct xfs_dsb in the kernel's fs/xfs/libxfs/xfs_format.h, big
// endian, and of struct ext4_super_block in its fs/ext4/ext4.h, little endian.
const (
	xfsMagic       = "XFSB"
	xfsRealtime    = 16 // sb_rblocks
	xfsLogStart    = 48 // sb_logstart; 0 if the log is on another device
	xfsFieldsEnd   = 56
	ext4Start      = 1024
	ext4State      = 58
	ext4Magic      = 56
	ext4Compat     = 92
	ext4Incompat   = 96
	ext4Journal    = 224 // s_journal_inum; 0 if the journal is on another device
	ext4FieldsEnd  = 228
	ext4MagicValue = 0xef53
	// Bits of s_state, s_feature_compat and s_feature_incompat.
	ext4HasErrors  = 0x2
	ext4HasJournal = 0x4
	ext4Recover    = 0x4
	ext4JournalDev = 0x8
)

// identify identifies the filesystem on a disk. It refuses a disk that is not exactly one
// filesystem usable as a sandbox's volume; the error says what was found instead.
func identify(disk io.ReaderAt) (found, error) {
	head := make([]byte, headBytes)
	n, err := disk.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return found{}, fmt.Errorf("read its beginning: %w", err)
	}
	head = head[:n]
	foreign := foreignTo(head)
	if has(head, 0, xfsMagic) && n >= xfsFieldsEnd {
		if foreign != "" {
			return found{}, unclear(foreign, "an xfs")
		}
		return identifyXFS(head)
	}
	if at := ext4Start + ext4Magic; n >= ext4Start+ext4FieldsEnd && binary.LittleEndian.Uint16(head[at:]) == ext4MagicValue {
		if foreign != "" {
			return found{}, unclear(foreign, "an ext4")
		}
		return identifyExt4(head[ext4Start:])
	}
	switch {
	case foreign != "":
		return found{}, fmt.Errorf("it holds %s, not xfs or ext4: name the disk or the partition that holds the filesystem itself", foreign)
	case n == 0:
		return found{}, errors.New("it is empty: 0 bytes")
	case len(bytes.Trim(head, "\x00")) == 0:
		return found{}, fmt.Errorf("it holds nothing: its first %d bytes are zero", n)
	default:
		return found{}, fmt.Errorf("it holds neither xfs nor ext4: it begins with % x", head[:min(n, 16)])
	}
}

// unclear refuses a filesystem that may be a leftover, because mounting it would overwrite the
// present content.
func unclear(foreign, fstype string) error {
	return fmt.Errorf("it holds %s and also signs of %s, one of them left over: a disk with unclear contents is not touched (wipefs DISK lists both)", foreign, fstype)
}

func identifyXFS(head []byte) (found, error) {
	if binary.BigEndian.Uint64(head[xfsLogStart:]) == 0 {
		return found{}, errors.New("it holds an xfs whose log is on another disk: mount the two by hand, under a kernel that can")
	}
	if binary.BigEndian.Uint64(head[xfsRealtime:]) != 0 {
		return found{}, errors.New("it holds an xfs with a realtime section on another disk: mount the two by hand, under a kernel that can")
	}
	return found{fstype: "xfs"}, nil
}

func identifyExt4(sb []byte) (found, error) {
	incompat := binary.LittleEndian.Uint32(sb[ext4Incompat:])
	if incompat&ext4JournalDev != 0 {
		return found{}, errors.New("it holds the journal of an ext4 that is on another disk: mount the two by hand")
	}
	if binary.LittleEndian.Uint32(sb[ext4Compat:])&ext4HasJournal != 0 && binary.LittleEndian.Uint32(sb[ext4Journal:]) == 0 {
		return found{}, errors.New("it holds an ext4 whose journal is on another disk: mount the two by hand")
	}
	return found{
		fstype:  "ext4",
		replays: incompat&ext4Recover != 0,
		erred:   binary.LittleEndian.Uint16(sb[ext4State:])&ext4HasErrors != 0,
	}, nil
}

// foreignTo returns the name of another known format on the disk, recognized by a signature; "" if
// there is none.
func foreignTo(head []byte) string {
	for _, s := range []struct {
		at         int
		magic, are string
	}{
		{0, "LUKS\xba\xbe", "a LUKS container"},
		{0, "QFI\xfb", "a qcow2 image"},
		{0, "KDMV", "a VMDK image"},
		{0, "hsqs", "a squashfs"},
		{512, "LABELONE", "an LVM physical volume"},
		{4096, "\xfc\x4e\x2b\xa9", "a member of an md array"},
		{4086, "SWAPSPACE2", "swap space"},
		{1024, "\xe2\xe1\xf5\xe0", "an erofs"},
		{1024, "\x10\x20\xf5\xf2", "an f2fs"},
		{65600, "_BHRfS_M", "a btrfs"},
		{32769, "CD001", "an ISO 9660 image"},
	} {
		if has(head, s.at, s.magic) {
			return s.are
		}
	}
	if has(head, 512, "EFI PART") || has(head, 4096, "EFI PART") {
		return "a partition table (GPT)"
	}
	if hasPartitions(head) {
		return "a partition table (MBR)"
	}
	return ""
}

// refuseMember refuses a disk that is a member of an md array, by the array's superblock near the
// disk's end. Versions 0.90 and 1.0 have the superblock there (the kernel's
// include/uapi/linux/raid/md_p.h), so such a disk begins like one with a plain filesystem. A write
// to one member would make it differ from the others.
func refuseMember(disk io.ReadSeeker) error {
	size, err := disk.Seek(0, io.SeekEnd) // also works for a block device
	if err != nil {
		return fmt.Errorf("find its end: %w", err)
	}
	for _, at := range []int64{(size/512 - 16) &^ 7 * 512, size&^0xffff - 0x10000} {
		var magic [4]byte
		if at < 0 {
			continue
		}
		if _, err := disk.Seek(at, io.SeekStart); err != nil {
			return fmt.Errorf("read its end: %w", err)
		}
		if _, err := io.ReadFull(disk, magic[:]); err != nil {
			return fmt.Errorf("read its end: %w", err)
		}
		if string(magic[:]) == "\xfc\x4e\x2b\xa9" || string(magic[:]) == "\xa9\x2b\x4e\xfc" {
			return errors.New("it is a member of an md array, as the metadata at its end says: assemble the array and name the array (or run wipefs DISK if the metadata is left over)")
		}
	}
	return nil
}

func has(head []byte, at int, magic string) bool {
	return len(head) >= at+len(magic) && string(head[at:at+len(magic)]) == magic
}

// hasPartitions reports whether the first sector is an MBR with at least one entry, and each
// entry's status byte is valid. The signature is not enough: a boot sector inside a filesystem may
// end in the same two bytes.
func hasPartitions(head []byte) bool {
	if !has(head, 510, "\x55\xaa") {
		return false
	}
	used := false
	for at := 446; at < 510; at += 16 {
		entry := head[at : at+16]
		if entry[0]&^0x80 != 0 {
			return false
		}
		used = used || entry[4] != 0 && binary.LittleEndian.Uint32(entry[12:]) != 0
	}
	return used
}
