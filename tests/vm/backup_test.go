package vm

import (
	"os"
	"testing"
)

func TestDamagedCopyOfASuperblockIsSeen(t *testing.T) {
	const bytes = 600 << 20 // five groups, so the last copy is that of group 3
	image, err := Scratch(t.Context(), t.TempDir(), "ext4", bytes, "-b", "4096")
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckBackups(t.Context(), image); err != nil {
		t.Errorf("an ext4 without damage: %v", err)
	}
	s, err := readExt4Super(image, SuperblockOffset("ext4"))
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, block := range s.backups() {
		for name, at := range map[string]uint64{"superblock": block, "group descriptors": block + 1} {
			old := make([]byte, s.blockBytes)
			if _, err := file.ReadAt(old, int64(at*s.blockBytes)); err != nil {
				t.Fatal(err)
			}
			if _, err := file.WriteAt(make([]byte, len(old)), int64(at*s.blockBytes)); err != nil {
				t.Fatal(err)
			}
			if err := CheckBackups(t.Context(), image); err == nil {
				t.Errorf("block %d, the %s, is empty\nwant an error\ngot  nil", block, name)
			}
			if _, err := file.WriteAt(old, int64(at*s.blockBytes)); err != nil {
				t.Fatal(err)
			}
		}
	}
}
