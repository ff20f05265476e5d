package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

// The root of an initramfs is its own parent. A list that compared each mount with all others, and
// each parent again, would not end here.
func TestMountsInSightAreFoundAmongThousands(t *testing.T) {
	const mounts = 20_000
	var text strings.Builder
	fmt.Fprintln(&text, "1 1 0:2 / / rw - rootfs rootfs rw")
	for i := range mounts {
		fmt.Fprintf(&text, "%d 1 7:%d / /run/volumes/%d rw - ext4 /dev/loop%d rw\n", i+2, i, i, i)
	}
	fmt.Fprintf(&text, "%d 1 0:3 / /run/volumes/7/x rw - tmpfs hidden rw\n", mounts+2) // by the mount at 7
	all, err := Read(strings.NewReader(text.String()))
	if err != nil {
		t.Fatal(err)
	}
	list := ListOf(all)
	if got := len(list.InSight()); got != mounts+1 {
		t.Errorf("in sight\nwant %d\ngot  %d", mounts+1, got)
	}
	for _, m := range all {
		if over := list.Hiding(m); (over != nil) != (m.ID == mounts+2) {
			t.Errorf("what hides %s\nwant nothing, or the mount at 7\ngot  %v", m.Mountpoint, over)
		}
	}
}

// now returns the mount point of the mount with a source that Now returns, or "".
func now(t *testing.T, source string) (at, options string) {
	t.Helper()
	list, err := Now()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list.All {
		if m.Source == source {
			at, options = m.Mountpoint, m.Options
		}
	}
	return at, options
}

// Each change is in the answer to a call that begins after it. Another mount namespace has its own
// answers. Without a change, callers share one reading.
func TestNowIsNeverStale(t *testing.T) {
	dir := mounttest.Dir(t)
	other := filepath.Join(dir, "other")
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	source := "stale-" + filepath.Base(filepath.Dir(dir))
	check := func(when, at, option string) {
		t.Helper()
		if got, options := now(t, source); got != at || !strings.Contains(options, option) {
			t.Errorf("%s\nwant it at %q with %q\ngot  %q with %q", when, at, option, got, options)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 100 {
		place := filepath.Join(dir, "place")
		mounttest.Mount(t, source, place, "tmpfs", 0, "")
		check("mounted", place, "rw")
		must(unix.Mount("", place, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
		check("made read-only", place, "ro")
		must(unix.Mount(place, other, "", unix.MS_MOVE, ""))
		check("moved", other, "ro")
		mounttest.Unmount(t, other)
		check("unmounted", "", "")
	}
}

func TestNowIsOneReadingUntilAMountChanges(t *testing.T) {
	shares := false
	for range 100 { // another process of this machine may mount meanwhile
		first, err := Now()
		if err != nil {
			t.Fatal(err)
		}
		again, err := Now()
		if shares = first == again; shares || err != nil {
			break
		}
	}
	if !shares {
		t.Error("each call reads mountinfo")
	}
}

func TestNowIsOfTheThreadsNamespace(t *testing.T) {
	source := "own-" + filepath.Base(t.TempDir())
	mounttest.Mount(t, source, mounttest.Own(t), "tmpfs", 0, "")
	if at, _ := now(t, source); at == "" {
		t.Error("the mount of this thread is missing")
	}
	elsewhere := make(chan string)
	go func() {
		list, err := Now()
		if err != nil {
			elsewhere <- err.Error()
			return
		}
		for _, m := range list.All {
			if m.Source == source {
				elsewhere <- "it is there, too"
				return
			}
		}
		elsewhere <- ""
	}()
	if said := <-elsewhere; said != "" {
		t.Errorf("in another thread's namespace\nwant no such mount\ngot  %s", said)
	}
}

// A reading that has most lines from the one before is the same as one from the beginning. Two
// mounts may have the same line in an invalid text.
func TestLinesOfTheLastReadingAreUsedAgain(t *testing.T) {
	var r reading
	first := strings.SplitAfter(strings.TrimSuffix(kernelText, "\n"), "\n")
	for _, text := range []string{
		kernelText, kernelText, strings.Join(first[2:5], ""), kernelText + kernelText, "",
		strings.ReplaceAll(kernelText, "rw,relatime", "ro,relatime"), kernelText,
	} {
		got, err := r.parse(text)
		if err != nil {
			t.Fatal(err)
		}
		want, err := Read(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		equal := func(a, b *Info) bool { return *a == *b }
		if !slices.EqualFunc(got, want, equal) {
			t.Errorf("%s\nwant %v\ngot  %v", text, idsOf(want), idsOf(got))
		}
	}
	before := r.lines
	if _, err := r.parse("nonsense\n"); err == nil || len(r.lines) != len(before) {
		t.Errorf("want an error, and the lines as they were\ngot  %d lines, error %v", len(r.lines), err)
	}
}
