package vm

import (
	"os/exec"
	"strings"
	"testing"
)

func TestFreshFilesystemPassesItsCheck(t *testing.T) {
	for fstype, bytes := range map[string]int64{"ext4": 64 << 20, "xfs": 304 << 20} {
		image, err := Scratch(t.Context(), t.TempDir(), fstype, bytes)
		if err != nil {
			t.Fatal(err)
		}
		fsck, err := Check(t.Context(), fstype, image)
		if err != nil {
			t.Fatal(err)
		}
		if err := fsck.Err(fstype); err != nil {
			t.Error(err)
		}
	}
}

// e2fsck exits with 0 here; only its output shows the damage.
func TestWrongFreeBlocksCountIsRefusedThoughE2fsckExits0(t *testing.T) {
	image, err := Scratch(t.Context(), t.TempDir(), "ext4", 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("debugfs", "-w", "-R", "ssv free_blocks_count 7", image).CombinedOutput(); err != nil {
		t.Fatalf("debugfs: %v\n%s", err, out)
	}
	fsck, err := Check(t.Context(), "ext4", image)
	if err != nil {
		t.Fatal(err)
	}
	if fsck.Exit != 0 {
		t.Errorf("e2fsck exits\nwant 0, or this test shows nothing\ngot  %d\n%s", fsck.Exit, fsck.Output)
	}
	if err := fsck.Err("ext4"); err == nil || !strings.Contains(err.Error(), "? no") {
		t.Errorf("want it refused for its question\ngot  %v\n%s", err, fsck.Output)
	}
}

func TestDamagedXFSIsRefused(t *testing.T) {
	image, err := Scratch(t.Context(), t.TempDir(), "xfs", 304<<20)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("xfs_db", "-x", "-c", "sb 0", "-c", "write fdblocks 7", image).CombinedOutput(); err != nil {
		t.Fatalf("xfs_db: %v\n%s", err, out)
	}
	fsck, err := Check(t.Context(), "xfs", image)
	if err != nil {
		t.Fatal(err)
	}
	if err := fsck.Err("xfs"); err == nil {
		t.Errorf("want it refused\ngot exit %d\n%s", fsck.Exit, fsck.Output)
	}
}
