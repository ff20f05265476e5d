package output

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestFileIsReplacedWholeOrNotAtAll(t *testing.T) {
	small := t.TempDir()
	if err := unix.Mount("none", small, "tmpfs", 0, "size=64k"); err != nil {
		t.Skip(err, ": a full disk takes a mount: run as root: go test -run Replaced ./protocols/output")
	}
	defer unix.Unmount(small, unix.MNT_DETACH)
	file := filepath.Join(small, "facts.json")
	if err := WriteFile(file, []byte("before")); err != nil {
		t.Fatal(err)
	}
	err := WriteFile(file, make([]byte, 1<<20))
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), " "+file+":") {
		t.Errorf("\nwant that the disk is full, and the file's name\ngot  %v", err)
	}
	if got, err := os.ReadFile(file); string(got) != "before" {
		t.Errorf("\nwant the file before\ngot  %.20q (%d bytes), %v", got, len(got), err)
	}
	if left, err := os.ReadDir(small); err != nil || len(left) != 1 {
		t.Errorf("\nwant one file\ngot  %v, %v", left, err)
	}
	if err := WriteFile(file, []byte("after")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(file); string(got) != "after" {
		t.Errorf("\nwant the file after\ngot  %q, %v", got, err)
	}
}

// --json /dev/stdout, a named pipe, or a link to a file elsewhere.
func TestDeviceOrLinkIsWrittenToInItsPlace(t *testing.T) {
	dir := t.TempDir()
	there, link := filepath.Join(dir, "there"), filepath.Join(dir, "link")
	if err := os.Symlink(there, link); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"/dev/null", link} {
		before, err := os.Lstat(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := WriteFile(file, []byte("x")); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		if after, err := os.Lstat(file); err != nil || after.Mode() != before.Mode() {
			t.Errorf("%s\nwant mode %v\ngot  %v, %v", file, before.Mode(), after.Mode(), err)
		}
	}
	if got, err := os.ReadFile(there); string(got) != "x" {
		t.Errorf("behind the link\nwant x\ngot  %q, %v", got, err)
	}
}
