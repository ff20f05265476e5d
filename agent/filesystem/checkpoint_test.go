package filesystem

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

// A checkpoint leaves nothing in the journal, also if there was nothing, and needs no journal. A
// read-only mount has nothing to write.
func TestCheckpointEmptiesTheJournal(t *testing.T) {
	for _, fstype := range Names() {
		t.Run(fstype, func(t *testing.T) {
			image, dir := mounttest.Image(t, fstype), mounttest.Dir(t)
			disk := mounttest.Attach(t, image)
			mounttest.Mount(t, disk, dir, fstype, 0, "")
			one, _ := Lookup(fstype)
			fsynced(t, filepath.Join(dir, "file"))
			if ext := strings.HasPrefix(fstype, "ext"); ext && journalStart(t, disk) == "0" {
				t.Error("the journal is empty before the checkpoint, so this test shows nothing")
			}
			for range 2 {
				checkpointed(t, one, dir)
				if ext := strings.HasPrefix(fstype, "ext"); ext && journalStart(t, disk) != "0" {
					t.Errorf("the journal's start after the checkpoint\nwant 0\ngot  %s", journalStart(t, disk))
				}
			}
			mounttest.Unmount(t, dir)
			mounttest.Mount(t, disk, dir, fstype, unix.MS_RDONLY, "")
			checkpointed(t, one, dir)
		})
	}
	image, dir := mounttest.Image(t, "ext4"), mounttest.Dir(t)
	if out, err := exec.Command("tune2fs", "-O", "^has_journal", image).CombinedOutput(); err != nil {
		t.Fatalf("tune2fs: %v\n%s", err, out)
	}
	mounttest.Mount(t, mounttest.Attach(t, image), dir, "ext4", 0, "")
	checkpointed(t, ext4, dir)
}

func checkpointed(t *testing.T, fstype Type, mountPoint string) {
	t.Helper()
	dir, err := os.Open(mountPoint)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := fstype.Checkpoint(dir); err != nil {
		t.Errorf("checkpoint: %v", err)
	}
}

func fsynced(t *testing.T, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Sync(); err != nil {
		t.Fatal(err)
	}
}

// journalStart returns the block of an ext4's journal from which a replay would start; 0 means that
// nothing is to be replayed.
func journalStart(t *testing.T, disk string) string {
	t.Helper()
	out, err := exec.Command("dumpe2fs", "-h", disk).CombinedOutput()
	if err != nil {
		t.Fatalf("dumpe2fs: %v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if start, ok := strings.CutPrefix(line, "Journal start:"); ok {
			return strings.TrimSpace(start)
		}
	}
	t.Fatalf("dumpe2fs does not show where the journal starts:\n%s", out)
	return ""
}
