package volume

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

func TestOnlyAVolumeWithoutWaitingIsMeasuredAtOnce(t *testing.T) {
	for fstype, want := range map[string]bool{"tmpfs": true, "virtiofs": false, "fuse": false, "nfs4": false, "overlay": false, "ext4": false} {
		v := &Volume{FSType: fstype} // a tmpfs has no watch; nor has an ext4 whose device is not known
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

// While mounts are followed, a volume's mount is checked once per change of the mounts, and not at
// each call. A bind mount in the volume's place has the same filesystem, so nothing else shows it.
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
	atOnce := func() bool { _, ok := table.StatsAtOnce(dir); return ok }
	mounttest.Await(t, "seen since the last change", func() bool { return atOnce() && table.at(dir).seen != 0 })
	mounttest.Mount(t, filepath.Join(dir, "within"), dir, "", unix.MS_BIND, "")
	mounttest.Await(t, "the other mount is found", func() bool { return !atOnce() })
	if atOnce() {
		t.Error("the mount before is answered for again")
	}
	mounttest.Unmount(t, dir)
	mounttest.Await(t, "it is seen again", atOnce)
}

// A growth is made at once only if Resize would make it, the volume is known and healthy, no other
// call has it, and the disk has grown. All other growths are left to Resize.
func TestOnlyAGrowthWithoutWaitingIsMadeAtOnce(t *testing.T) {
	dir := mounttest.Dir(t)
	image := mounttest.Image(t, "xfs")
	disk := mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	table := newTable()
	grow := func(ctx context.Context, size uint64) bool { return table.ResizeAtOnce(ctx, dir, size) }
	blocks := func() uint64 {
		st, err := statfs(dir)
		if err != nil {
			t.Fatal(err)
		}
		return st.Bytes.Total
	}
	before := blocks()
	const larger = 400 << 20
	if grow(t.Context(), 0) {
		t.Error("grown: a volume that nobody had looked up")
	}
	if _, err := table.Stats(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	v := table.at(dir)
	mounttest.Await(t, "looked at, and waiting for its next look", func() bool { return grow(t.Context(), 0) })
	if blocks() != before {
		t.Fatal("it has grown on a disk that has not")
	}
	if grow(t.Context(), larger) {
		t.Error("grown: to a size that its disk has not")
	}
	if err := os.Truncate(image, larger); err != nil {
		t.Fatal(err)
	}
	mounttest.Run(t, "losetup", "-c", disk)

	done, err := v.alone(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if grow(t.Context(), larger) {
		t.Error("grown: beside another call that is in it")
	}
	done()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if grow(over, larger); blocks() != before {
		t.Error("grown: when its caller's time was over")
	}
	mounttest.Await(t, "grown", func() bool { return grow(t.Context(), larger) })
	if grown := blocks(); grown <= before {
		t.Errorf("%d bytes before, %d behind", before, grown)
	}
	mounttest.Mount(t, "over", dir, "tmpfs", 0, "")
	if grow(t.Context(), larger) {
		t.Error("grown: with another mount in its place")
	}
	mounttest.Unmount(t, dir)
	if grow(t.Context(), 200<<20) {
		t.Error("a smaller size is for Resize to refuse")
	}
	if err := v.Resize(t.Context(), larger, 0); err != nil { // the lock is free, and the watch goes on
		t.Error(err)
	}
}
