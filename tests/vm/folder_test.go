package vm

import (
	"os"
	"path/filepath"
	"testing"
)

// A killed process releases its lock, and removes nothing.
func TestFolderOfAKilledProcessIsRemovedByTheNext(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	left, lock, err := makeFolder()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(left, "disk.img"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	lock.Close()
	unmarked := filepath.Join(os.TempDir(), "directvol-guest-of-somebody")
	if err := os.Mkdir(unmarked, 0o700); err != nil {
		t.Fatal(err)
	}
	used, lock, err := makeFolder()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, next, err := makeFolder(); err != nil {
		t.Fatal(err)
	} else {
		defer next.Close()
	}
	for dir, want := range map[string]bool{left: false, used: true, unmarked: true} {
		if got := exists(dir); got != want {
			t.Errorf("%s is there\nwant %v\ngot  %v", dir, want, got)
		}
	}
}
