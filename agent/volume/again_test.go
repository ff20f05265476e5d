package volume

import (
	"context"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// eachCover tests a mounted xfs at dir once with cover as the folder above dir and once with cover
// as dir itself.
func eachCover(t *testing.T, test func(t *testing.T, dir, cover string)) {
	for name, above := range map[string]bool{"the folder above": true, "the volume itself": false} {
		t.Run(name, func(t *testing.T) {
			parent := filepath.Join(mounttest.Dir(t), "a")
			dir := filepath.Join(parent, "v")
			mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), dir, "xfs", 0, "")
			if above {
				test(t, dir, parent)
			} else {
				test(t, dir, dir)
			}
		})
	}
}

// Another mount covers the volume, or a folder above it, for a moment. The volume stays mounted all
// the time.
func TestVolumeThatWasCoveredKeepsItsOwner(t *testing.T) {
	eachCover(t, func(t *testing.T, dir, cover string) {
		table := newTable()
		if err := table.Own(dir, mount.Identity{}, health.Past{}); err != nil {
			t.Fatal(err)
		}
		want := health.Past{Unreadable: 3, LastRead: "x"}
		table.Remember(dir, want)
		of := table.known(dir).identity
		release, block := make(chan struct{}), make(chan struct{})
		ended := make(chan error, 1)
		go func() { // a call that is still running
			ended <- table.Quiet(context.Background(), dir, func() (bool, error) { close(block); <-release; return false, nil })
		}()
		<-block
		for range 2 {
			mounttest.Mount(t, "cover", cover, "tmpfs", 0, "")
			if v, err := table.Lookup(dir); err == nil && v.FSType != "tmpfs" {
				t.Errorf("while it is covered\nwant another, or none\ngot  %+v", v)
			}
			if v := table.known(dir); dir != cover && (v == nil || !v.identity.Same(of)) {
				t.Errorf("what is remembered of it while it is covered is forgotten: %+v", v)
			}
			if past := table.Past(dir, of); past != want {
				t.Errorf("while it is covered\nwant %+v\ngot  %+v", want, past)
			}
			mounttest.Unmount(t, cover)
			v, err := table.Lookup(dir)
			if err != nil {
				t.Fatal(err)
			}
			if past := table.Past(dir, of); !v.Owned() || past != want {
				t.Errorf("in sight again\nwant it owned, %+v\ngot  owned %v, %+v", want, v.Owned(), past)
			}
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if err := table.Quiet(over, dir, func() (bool, error) { return false, nil }); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Errorf("beside an unfinished call\nwant a DeadlineExceeded\ngot  %v", err)
		}
		close(release)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if _, err := table.Stats(t.Context(), dir); err != nil { // the watch looks again after its pause
			t.Error(err)
		}
		if err := table.Quiet(t.Context(), dir, func() (bool, error) { return true, unix.Unmount(dir, 0) }); err != nil {
			t.Fatal(err)
		}
		if v := table.known(dir); v != nil {
			t.Errorf("unmounted, and still known: %+v", v)
		}
	})
}

// A covered volume that somebody unmounts is forgotten.
func TestHiddenVolumeThatIsUnmountedIsForgotten(t *testing.T) {
	dir := mounttest.Dir(t)
	mounttest.Mount(t, "first", dir, "tmpfs", 0, "")
	table := newTable()
	for _, do := range []func(){
		func() { mounttest.Mount(t, "second", dir, "tmpfs", 0, "") },
		func() { mounttest.Unmount(t, dir); mounttest.Unmount(t, dir) },
	} {
		if _, err := table.Lookup(dir); err != nil {
			t.Fatal(err)
		}
		do()
	}
	if _, err := table.Lookup(dir); errkind.Of(err) != errkind.InvalidArgument || table.known(dir) != nil {
		t.Errorf("want no volume\ngot  %+v, error %v", table.known(dir), err)
	}
}

// Statistics that began before the volume was unmounted and mounted again must not change the state
// of the new mount.
func TestLateStatisticsDoNotChangeTheNextMount(t *testing.T) {
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	table := newTable()
	before, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	m, _ := before.begin() // another caller's measurement, which has not run yet
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := before.stats(late); errkind.Of(err) != errkind.DeadlineExceeded { // joins the measurement
		t.Fatalf("want a DeadlineExceeded\ngot  %v", err)
	}
	if err := table.Quiet(t.Context(), dir, func() (bool, error) { return true, unix.Unmount(dir, 0) }); err != nil {
		t.Fatal(err)
	}
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	if err := table.Own(dir, mount.Identity{}, health.Past{}); err != nil {
		t.Fatal(err)
	}
	after := table.at(dir)
	before.measure(m)
	if _, err := table.statsOf(t.Context(), before); err != nil {
		t.Errorf("want the statistics of what is there now\ngot  %v", err)
	}
	if table.at(dir) != after || !after.Owned() {
		t.Errorf("the newer volume is forgotten: nobody probes it by writing any more")
	}
	table.Forget(dir)
}
