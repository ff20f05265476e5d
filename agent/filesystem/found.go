package filesystem

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
)

// foundBytes is the size of a disk's beginning that holds all marks; the mark of btrfs is the last.
const foundBytes = 68 << 10

// mark is a byte sequence at a position that identifies another use of a disk.
type mark struct {
	name  string
	at    int
	bytes string
}

// marks are checked in this order. A filesystem may leave the earlier contents of the first sectors
// in place, and a GPT has a protective MBR.
var marks = []mark{
	{"LUKS", 0, "LUKS\xba\xbe"},                 // LUKS1 and LUKS2 On-Disk Format Specification
	{"an LVM physical volume", 512, "LABELONE"}, // struct label_header, lib/label/label.h of LVM2: in one of four sectors
	{"an LVM physical volume", 0, "LABELONE"},
	{"an LVM physical volume", 1024, "LABELONE"},
	{"an LVM physical volume", 1536, "LABELONE"},
	{"a btrfs with an invalid superblock", 0x10040, "_BHRfS_M"}, // BTRFS_MAGIC, include/uapi/linux/btrfs_tree.h, in the superblock at 64 KiB
	{"swap space", 4096 - 10, "SWAPSPACE2"},                     // union swap_header, include/linux/swap.h: at a page's end
	{"swap space", 4096 - 10, "SWAP-SPACE"},
	{"a member of an md array", 0, "\xfc\x4e\x2b\xa9"},    // MD_SB_MAGIC, include/uapi/linux/raid/md_p.h: version 1.1
	{"a member of an md array", 4096, "\xfc\x4e\x2b\xa9"}, // version 1.2
	{"squashfs", 0, "hsqs"},                               // SQUASHFS_MAGIC, include/uapi/linux/magic.h
	{"erofs", 1024, "\xe2\xe1\xf5\xe0"},                   // EROFS_SUPER_MAGIC_V1
	{"f2fs", 1024, "\x10\x20\xf5\xf2"},                    // F2FS_SUPER_MAGIC
	{"an ISO 9660 image", 32769, "CD001"},                 // ECMA-119, 8.1.2
	{"NTFS", 3, "NTFS    "},                               // fs/ntfs3/ntfs.h, struct NTFS_BOOT
	{"exFAT", 3, "EXFAT   "},                              // fs/exfat/exfat_raw.h, STR_EXFAT
	{"FAT", 54, "FAT1"},                                   // fs/fat: struct fat_boot_sector's fs_type
	{"FAT", 82, "FAT32"},
	{"an xfs with an invalid superblock", 0, "XFSB"},              // XFS_SB_MAGIC
	{"an ext4 with an invalid superblock", 1080, "\x53\xef"},      // EXT4_SUPER_MAGIC
	{"a partition table (GPT)", 512, "EFI PART"},                  // GPT_HEADER_SIGNATURE, block/partitions/efi.h
	{"a partition table (GPT)", 4096, "EFI PART"},                 // on sectors of 4 KiB
	{"a boot sector or a partition table (MBR)", 510, "\x55\xaa"}, // MSDOS_LABEL_MAGIC1, block/partitions/msdos.c
}

// Found describes, with its article, what a disk seems to hold if Identify does not know it. It
// returns "" if nothing is recognized.
func Found(disk *os.File) string {
	begin := make([]byte, foundBytes)
	n, _ := disk.ReadAt(begin, 0) // less than foundBytes on a small disk
	return found(begin[:n])
}

// found is Found for a disk's first bytes, which are untrusted.
func found(begin []byte) string {
	if isExt4Journal(begin) {
		return "the external journal of an ext4"
	}
	for _, m := range marks {
		if len(begin) >= m.at && bytes.HasPrefix(begin[m.at:], []byte(m.bytes)) {
			return m.name
		}
	}
	if len(begin) > 0 && len(bytes.TrimLeft(begin, "\x00")) == 0 {
		return fmt.Sprintf("nothing known: its first %d bytes are zero", len(begin))
	}
	return ""
}

// isExt4Journal reports whether the superblock belongs to an external journal of an ext4 on another
// disk (EXT4_FEATURE_INCOMPAT_JOURNAL_DEV in fs/ext4/ext4.h).
func isExt4Journal(begin []byte) bool {
	if len(begin) < ext4SuperOffset+ext4SuperSize {
		return false
	}
	super := begin[ext4SuperOffset:]
	return binary.LittleEndian.Uint16(super[0x38:]) == ext4Magic && binary.LittleEndian.Uint32(super[0x60:])&ext4JournalDevice != 0
}
