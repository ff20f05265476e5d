package volume

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// remount mounts a disk again and again until the mount has the same number as before.
func remount(t *testing.T, disk, dir, fstype string, was int) {
	t.Helper()
	for range 100 {
		mounttest.Mount(t, disk, dir, fstype, 0, "")
		var st unix.Statx_t
		if err := unix.Statx(unix.AT_FDCWD, dir, 0, unix.STATX_MNT_ID, &st); err != nil {
			t.Fatal(err)
		}
		if int(st.Mnt_id) == was {
			return
		}
		mounttest.Unmount(t, dir)
	}
	t.Skip("the number of the mount did not come again: other mounts were made meanwhile; run it alone")
}

func mountNumber(t *testing.T, dir string) int {
	t.Helper()
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, 0, unix.STATX_MNT_ID, &st); err != nil {
		t.Fatal(err)
	}
	return int(st.Mnt_id)
}

// Somebody unmounts a volume and mounts it again: the kernel reuses the mount's number, and xfs
// returns the same filesystem ID from statfs. The earlier mount's state must not be used for the
// new one.
func TestVolumeMountedAgainWithItsNumberIsAnotherOne(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) {
			dir := mounttest.Dir(t)
			disk := mounttest.Attach(t, mounttest.Image(t, fstype))
			mounttest.Mount(t, disk, dir, fstype, 0, "")
			number := mountNumber(t, dir)
			table := newTable()
			before, err := table.Lookup(dir)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := table.Stats(t.Context(), dir); err != nil {
				t.Fatal(err)
			}
			if again, err := table.Lookup(dir); again != before || err != nil {
				t.Fatalf("asked again: another volume, error %v", err)
			}
			if err := table.Quiet(t.Context(), dir, func() (bool, error) { return false, unix.Unmount(dir, 0) }); err != nil {
				t.Fatal(err)
			}
			remount(t, disk, dir, fstype, number)
			if _, ok := table.StatsAtOnce(dir); ok {
				t.Error("the mount is answered for at once by what was known of the one before")
			}
			if after, err := table.Lookup(dir); after == before || err != nil {
				t.Errorf("want another volume\ngot  the same, error %v", err)
			}
			table.Forget(dir)
		})
	}
}

// The Past of a mount is not applied to the next mount with the same number.
func TestNextMountDoesNotInheritPastConditions(t *testing.T) {
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	first := newTable()
	if _, err := first.Lookup(dir); err != nil {
		t.Fatal(err)
	}
	of := first.known(dir).identity
	if err := first.Quiet(t.Context(), dir, func() (bool, error) { return true, nil }); err != nil { // ends its watch
		t.Fatal(err)
	}
	past := health.Past{Unreadable: 3, LastRead: "x"}
	second := newTable()
	if err := second.Own(dir, of, past); err != nil {
		t.Fatal(err)
	}
	if got := second.Past(dir, of); got != past {
		t.Errorf("after a restart\nwant %+v\ngot  %+v", past, got)
	}
	err := second.Quiet(t.Context(), dir, func() (bool, error) { return true, unix.Unmount(dir, 0) })
	if err != nil {
		t.Fatal(err)
	}
	remount(t, disk, dir, "xfs", of.ID)
	third := newTable()
	if err := third.Own(dir, of, past); err != nil {
		t.Fatal(err)
	}
	if got := third.Past(dir, mount.Identity{}); got != (health.Past{}) {
		t.Errorf("after it was mounted again\nwant nothing\ngot  %+v", got)
	}
	third.Forget(dir)
}

// An open file of the earlier mount does not belong to the volume.
func TestGrowthAffectsOnlyItsOwnMount(t *testing.T) {
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	other := filepath.Join(dir, "other")
	dir = filepath.Join(dir, "volume")
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	mounttest.Mount(t, disk, other, "xfs", 0, "") // a second mount of the same disk
	table := newTable()
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	for path, mine := range map[string]bool{dir: true, other: false} {
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := v.check(file, toGrow); (err == nil) != mine {
			t.Errorf("%s: want it to be the volume's: %v\ngot  %v", path, mine, err)
		}
		file.Close()
	}
	table.Forget(dir)
}

// The path leads to the topmost mount, which is the volume.
func TestVolumeMountedOverAnotherIsTheOneFound(t *testing.T) {
	dir := mounttest.Own(t)
	for _, source := range []string{"below", "above"} {
		mounttest.Mount(t, source, dir, "tmpfs", 0, "")
	}
	for _, source := range []string{"above", "below"} {
		v, err := newTable().Lookup(dir)
		if err != nil || v.identity.Source != source {
			t.Fatalf("want the mount of %q\ngot  %+v, error %v", source, v, err)
		}
		if err := v.Resize(t.Context(), 0, 0); errkind.Of(err) != errkind.FailedPrecondition {
			t.Errorf("want a FailedPrecondition\ngot  %v", err)
		}
		mounttest.Unmount(t, dir)
	}
}

// While a filesystem hangs, calls for paths in it are answered, and only one thread waits for it.
func TestPathInAHungFilesystemIsAnswered(t *testing.T) {
	dir := mounttest.Dir(t)
	late := time.AfterFunc(30*time.Second, mounttest.Hang(t, dir)) // then all calls that wait for it fail
	table := newTable()
	v, err := table.Lookup(dir)
	if err != nil || v.FSType != "fuse" {
		t.Fatalf("the mount itself\nwant a volume\ngot  %+v, error %v", v, err)
	}
	before := runtime.NumGoroutine()
	for _, path := range []string{"/a", "/b"} {
		if _, err := table.Lookup(dir + path); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Errorf("%s\nwant a DeadlineExceeded\ngot  %v", path, err)
		}
	}
	for runtime.NumGoroutine()-before > 1 { // also the one that has ended the last call's wait, for a moment
		runtime.Gosched()
	}
	if !late.Stop() {
		t.Error("somebody waited for the filesystem, or more than one thread does")
	}
}

// A watch that has lost its mount makes the table forget the volume, so that no call gets old
// answers.
func TestWatchThatHasLostItsMountEndsItsVolume(t *testing.T) {
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	table := newTable()
	v, err := table.Lookup(dir)
	if err == nil {
		_, err = table.Stats(t.Context(), dir) // waits for the watch's first look
	}
	if err != nil {
		t.Fatal(err)
	}
	mounttest.Unmount(t, dir)
	v.watch.Own() // makes the watch look again and find the mount gone
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for table.at(dir) != nil {
		select {
		case <-again.C:
		case <-t.Context().Done():
			t.Fatal("the volume is still known")
		}
	}
}
