package kernel

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

// Ctrl-C on a terminal is a SIGINT to each process of the group in the foreground. If apt-get got
// it too, its end would look like a failure of apt, and it would leave its temporary files behind.
func TestAptGetsNoCtrlCOfTheTerminal(t *testing.T) {
	bin := fakeApt(t, "")
	started := filepath.Join(bin, "hang")
	if err := unix.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	kerneltest.WriteFile(t, filepath.Join(bin, "options"), nil)
	get, err := os.ReadFile(filepath.Join(bin, "apt-get"))
	if err != nil {
		t.Fatal(err)
	}
	// A hanging update first makes a temporary file, as apt does, and shows its process group.
	script := strings.Replace(string(get), "[ ! -f hang ] ||", `[ ! -p hang ] || { mktemp >/dev/null; read -r _ _ _ _ group _ </proc/$$/stat; echo "$group" >hang; exec tail -f /dev/null; }; [ ! -f hang ] ||`, 1)
	if err := os.WriteFile(filepath.Join(bin, "apt-get"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	temp, cache := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temp)
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	done := make(chan error, 1)
	go func() {
		_, err := Open(ctx, Source{Cache: cache})
		done <- err
	}()
	text, err := os.ReadFile(started)
	if err != nil {
		t.Fatal(err)
	}
	var group int
	if _, err := fmt.Sscan(string(text), &group); err != nil {
		t.Fatal(err)
	}
	if own := unix.Getpgrp(); group == own {
		t.Errorf("apt-get's process group\nwant its own\ngot  %d, this program's", group)
	}
	interrupt()
	if err := <-done; err == nil || err.Error() != context.Canceled.Error() {
		t.Errorf("\nwant %v\ngot  %v", context.Canceled, err)
	}
	if err := unix.Kill(-group, 0); group != unix.Getpgrp() && err != unix.ESRCH {
		t.Errorf("apt's processes\nwant all ended\ngot  %v", err)
	}
	for _, dir := range []string{temp, cache} {
		if left := filesBelow(t, dir); left != "" {
			t.Errorf("left in %s: %s", dir, left)
		}
	}
}

// dpkg-deb does not get it either, and the error of its end is not reported.
func TestInterruptedUnpackingSaysOnlyThat(t *testing.T) {
	bin := t.TempDir()
	deb := filepath.Join(bin, "x.deb")
	kerneltest.WriteFile(t, deb, []byte("x"))
	started := filepath.Join(bin, "started")
	if err := unix.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\necho $$ >'" + started + "'\nexec tail -f /dev/null\n"
	if err := os.WriteFile(filepath.Join(bin, "dpkg-deb"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	cache := t.TempDir()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	done := make(chan error, 1)
	go func() {
		_, err := Open(ctx, Source{Debs: []string{deb}, Cache: cache})
		done <- err
	}()
	if _, err := os.ReadFile(started); err != nil {
		t.Fatal(err)
	}
	interrupt()
	if err := <-done; err == nil || err.Error() != context.Canceled.Error() {
		t.Errorf("\nwant %v\ngot  %v", context.Canceled, err)
	}
	if left := filesBelow(t, cache); left != "" {
		t.Errorf("left in the cache: %s", left)
	}
}

// apt's last line only sums up; the cause is in an earlier line.
func TestFullDiskIsNamedWhereAptNoticesItFirst(t *testing.T) {
	bin := fakeApt(t, "", unsplit(buildDeb(t), strings.Repeat("0", 64))...)
	kerneltest.WriteFile(t, filepath.Join(bin, "refusal"), []byte("E: Failed to fetch http://a/Packages  Error writing to file - write (28: No space left on device)\nE: Some index files failed to download.\n"))
	cache := t.TempDir()
	_, err := Open(t.Context(), Source{Cache: cache})
	if err == nil || !strings.Contains(err.Error(), "the disk of "+cache) || !strings.Contains(err.Error(), "is full") {
		t.Errorf("\nwant an error that says that the disk of %s is full\ngot  %v", cache, err)
	}
}
