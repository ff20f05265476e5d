package volume

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// While another mount covers the volume, the kernel logs a fault of the volume's disk. The watch
// remembers the fault when the volume is in sight again.
func TestHiddenVolumeHearsTheKernelsLog(t *testing.T) {
	image := mounttest.Image(t, "xfs")
	info, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	dir, disk := mounttest.Dir(t), mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	table := newTable()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- table.monitor.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	<-table.monitor.Remembers() // Run has reached the end of the log
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Forget(dir)
	if now, err := v.watch.Conditions(t.Context()); len(now) > 0 || err != nil {
		t.Fatalf("at first\nwant nothing wrong\ngot  %v, error %v", now, err)
	}
	mounttest.Mount(t, "over", dir, "tmpfs", 0, "")
	if over, err := table.Lookup(dir); err != nil || over == v {
		t.Fatalf("covered\nwant another volume\ngot  %v, error %v", over, err)
	}
	cutOff := func() {
		for _, size := range []int64{info.Size() / 2, info.Size()} {
			mounttest.SetSize(t, disk, image, size)
		}
	}
	cutOff()
	again := time.NewTicker(6 * time.Second) // the kernel drops lines of its log if others come too fast
	defer again.Stop()
	for limit := time.After(2 * time.Minute); v.watch.Past() == (health.Past{}); {
		select {
		case <-table.monitor.Remembers():
		case <-again.C:
			cutOff()
		case <-limit:
			t.Fatal("after two minutes it remembers nothing")
		}
	}
	mounttest.Unmount(t, dir)
	if again, err := table.Lookup(dir); err != nil || again != v {
		t.Errorf("in sight again\nwant the volume of before\ngot  %v, error %v", again, err)
	}
	mounttest.Mount(t, "over", dir, "tmpfs", 0, "")
	if _, err := table.Lookup(dir); err != nil {
		t.Fatal(err)
	}
	mounttest.Unmount(t, dir)
	mounttest.Unmount(t, dir)
	_, _ = table.Lookup(dir) // Lookup finds that the volume is gone
	if n := table.monitor.Watched(); n != 0 {
		t.Errorf("unmounted, watches that hear the log\nwant none\ngot  %d", n)
	}
}

// An agent that starts owns the volume that it held before, not the one that somebody has mounted
// over it or over a folder above. What was remembered of the volume is not lost.
func TestVolumeThatIsCoveredIsOwnedInsteadOfItsCover(t *testing.T) {
	eachCover(t, func(t *testing.T, dir, cover string) {
		top, err := mount.Topmost(dir)
		if err != nil {
			t.Fatal(err)
		}
		of, past := mount.Identify(top), health.Past{Unreadable: 3, LastRead: "x"}
		mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "ext4")), cover, "ext4", 0, "")
		table := newTable()
		for range 2 {
			if err := table.Own(dir, of, past); err != nil {
				t.Fatal(err)
			}
			if got := table.Past(dir, of); got != past {
				t.Errorf("covered\nwant %+v\ngot  %+v", past, got)
			}
		}
		v := table.known(dir)
		v.watch.End() // as if it had looked once after it was covered
		table.lost(v)
		if n := table.monitor.Watched(); n != 1 {
			t.Errorf("covered, watches that hear the log\nwant 1\ngot  %d", n)
		}
		if over, err := table.Lookup(cover); err != nil || over.Owned() {
			t.Errorf("what covers it\nwant it to be nobody's\ngot  %+v, error %v", over, err)
		}
		mounttest.Unmount(t, cover)
		if again, err := table.Lookup(dir); err != nil || again != v || !again.Owned() || table.Past(dir, of) != past {
			t.Errorf("in sight again\nwant it owned, %+v\ngot  %+v, error %v", past, table.Past(dir, of), err)
		}
		table.Forget(dir)
		table.Forget(cover)
	})
}

// A server that the path leads through does not answer in time. The volume that is mounted there is
// owned nevertheless, identified by mountinfo.
func TestVolumeBehindAServerThatHangsIsOwned(t *testing.T) {
	folder, server := mounttest.ServeFolder(t)
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), folder, "xfs", 0, "")
	top, err := mount.Topmost(folder)
	if err != nil {
		t.Fatal(err)
	}
	release := server.HoldLookups()
	defer release()
	guard := time.AfterFunc(time.Minute, release) // then all calls that wait for the server return
	table := newTable()
	past := health.Past{Unreadable: 3, LastRead: "x"}
	if err := table.Own(folder, mount.Identify(top), past); err != nil {
		t.Fatal(err)
	}
	if v := table.at(folder); v == nil || !v.Owned() || v.watch.Past() != past {
		t.Errorf("want it owned, with what was remembered\ngot  %+v", v)
	}
	if !guard.Stop() {
		t.Error("somebody waited for the server")
	}
	if err := table.Own(filepath.Join(folder, "none"), mount.Identity{}, health.Past{}); err == nil {
		t.Error("a path that is not a mount point is owned")
	}
	release()
	if _, err := table.Stats(t.Context(), folder); err != nil {
		t.Errorf("when it answers again: %v", err)
	}
	table.Forget(folder)
}
