package killed

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestLockOnAnImageIsSeenUntilItIsReleased(t *testing.T) {
	image, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	v := &volume{}
	v.Path = image.Name()
	isLocked := func(want bool) {
		t.Helper()
		if got, err := v.locked(); err != nil || got != want {
			t.Errorf("locked\nwant %v\ngot  %v, error %v", want, got, err)
		}
	}
	isLocked(false)
	// The kind of lock that QEMU takes (block/file-posix.c).
	lock := unix.Flock_t{Type: unix.F_RDLCK, Start: 100, Len: 1}
	if err := unix.FcntlFlock(image.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
		t.Fatal(err)
	}
	isLocked(true)
	image.Close()
	isLocked(false)
}

func TestProcessAndFileThatAreLeftAreNamed(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(vmDir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(vmDir(dir), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	process := exec.Command("tail", "-f", file)
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = process.Process.Kill()
		_ = process.Wait() // it was killed
	}()
	ctx, cancel := contextThatEnds(t)
	defer cancel()
	left, err := leftOnHost(ctx, dir, true)
	if err != nil || len(left) != 2 || !strings.HasPrefix(left[0], "process ") || left[1] != "file "+file {
		t.Errorf("want the process and the file\ngot  %q, error %v", left, err)
	}
}

func TestBeyondHasTheAdditions(t *testing.T) {
	for _, c := range []struct{ all, some, want []string }{
		{nil, nil, nil},
		{[]string{"a", "b"}, []string{"b", "a"}, nil},
		{[]string{"a", "a", "b"}, []string{"a"}, []string{"a", "b"}},
		{[]string{"a"}, []string{"a", "c"}, nil},
	} {
		if got := beyond(c.all, c.some); !slices.Equal(got, c.want) {
			t.Errorf("%q beyond %q\nwant %q\ngot  %q", c.all, c.some, c.want, got)
		}
	}
}

func TestEveryPlaceOnPCIHasAName(t *testing.T) {
	const answer = `[{"bus": 0, "devices": [
		{"bus": 0, "slot": 2, "qdev_id": "b1", "pci_bridge": {"bus": {"number": 1}, "devices": [{"bus": 1, "slot": 3, "qdev_id": "disk-a"}]}},
		{"bus": 0, "slot": 16, "qdev_id": ""}]}]`
	var buses []pciBus
	if err := json.Unmarshal([]byte(answer), &buses); err != nil {
		t.Fatal(err)
	}
	want := []string{"PCI 00:02 b1", "PCI 01:03 disk-a", "PCI 00:10 "}
	if got := buses[0].places(); !slices.Equal(got, want) {
		t.Errorf("\nwant %q\ngot  %q", want, got)
	}
}
