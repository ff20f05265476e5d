package volume

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

func TestOnlyWhatWaitsForNobodyIsMeasuredAtOnce(t *testing.T) {
	for fstype, want := range map[string]bool{"tmpfs": true, "virtiofs": false, "fuse": false, "nfs4": false, "overlay": false, "ext4": false} {
		v := &Volume{FSType: fstype} // a tmpfs is without a watch, an ext4 whose device is not known too
		if _, got := v.conditionsAtOnce(); got != want {
			t.Errorf("%s without a watch\nwant at once %v\ngot          %v", fstype, want, got)
		}
	}
}

func TestTmpfsIsMeasuredAtOnceAsByTheServer(t *testing.T) {
	const path = "/dev/shm"
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil || st.Type != unix.TMPFS_MAGIC || st.Fsid == (unix.Fsid{}) {
		t.Skipf("%s is no tmpfs with an identity: mount one there, on Linux 5.14 or newer", path)
	}
	table := NewTable(health.NewMonitor(nil))
	if _, ok := table.StatsAtOnce(path); ok {
		t.Error("a volume was answered for that nobody had looked up: is it one?")
	}
	want, err := table.Stats(t.Context(), path)
	if err != nil {
		t.Skipf("%v: a mount with nothing over it is wanted: unmount what lies over /dev/shm", err)
	}
	got, ok := table.StatsAtOnce(path)
	if !ok || got.Bytes.Total != want.Bytes.Total || got.fsid != want.fsid || len(got.Conditions) != 0 {
		t.Errorf("\nwant %+v\ngot  %+v, %v", want, got, ok)
	}
}

// While mounts are followed, a volume's mount is looked at when one has changed, and not at
// each call. A bind mount in its place has the same filesystem, so nothing else shows it.
func TestMountIsLookedAtOnceForEachChange(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it mounts: run it as root")
	}
	dir := mounttest.Dir(t)
	mounttest.Mount(t, "followed", dir, "tmpfs", 0, "")
	if err := os.Mkdir(filepath.Join(dir, "within"), 0o755); err != nil {
		t.Fatal(err)
	}
	table := NewTable(health.NewMonitor(nil))
	if _, err := table.Stats(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if v := table.at(dir); v.seen != 0 {
		t.Errorf("while nobody follows\nwant it looked at each time\ngot  seen at %d", v.seen)
	}
	go table.FollowMounts(t.Context())
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	await := func(what string, is func() bool) {
		for !is() {
			select {
			case <-again.C:
			case <-t.Context().Done():
				t.Fatal("it never came to be: " + what)
			}
		}
	}
	atOnce := func() bool { _, ok := table.StatsAtOnce(dir); return ok }
	await("seen since the last change", func() bool { return atOnce() && table.at(dir).seen != 0 })
	mounttest.Mount(t, filepath.Join(dir, "within"), dir, "", unix.MS_BIND, "")
	await("the other mount is found", func() bool { return !atOnce() })
	if atOnce() {
		t.Error("the mount before is answered for again")
	}
	mounttest.Unmount(t, dir)
	await("it is seen again", atOnce)
}
