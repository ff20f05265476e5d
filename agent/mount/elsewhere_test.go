package mount

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// TestUnreadableProcessDelaysNoSearch uses a FIFO without a writer: a read from it blocks,
// like a read of such a process's mounts.
func TestUnreadableProcessDelaysNoSearch(t *testing.T) {
	proc := t.TempDir()
	if err := os.MkdirAll(filepath.Join(proc, "1/ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("mnt:[1]", filepath.Join(proc, "1/ns/mnt")); err != nil {
		t.Fatal(err)
	}
	stuck := filepath.Join(proc, "1/mountinfo")
	if err := unix.Mkfifo(stuck, 0o600); err != nil {
		t.Fatal(err)
	}
	want := "a process whose mounts cannot be read"
	for range 2 {
		if got := elsewhere(search{proc, 1}); strings.Join(got, ", ") != want {
			t.Errorf("users\nwant %s\ngot  %q", want, got)
		}
	}
	writer, err := os.OpenFile(stuck, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	writer.Close()
}

// A process that does not let its mounts be read delays an unmount for elsewhereLimit.
func TestSearchOfMountsElsewhereHasALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := make(chan struct{})
		stuck := search{"stuck", 1}
		go looks.Ask(t.Context(), stuck, func() []string { <-answers; return nil })
		synctest.Wait()
		began := time.Now()
		elsewhere(stuck)
		if took := time.Since(began); took != elsewhereLimit {
			t.Errorf("want it given up after %v\ngot  %v", elsewhereLimit, took)
		}
		close(answers)
	})
}
