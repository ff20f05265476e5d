package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// One busy volume makes each of several destroys fail.
func TestDestroyThatFailsCountsNoFailedReadTwice(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := newTable()
	if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
		t.Fatal(err)
	}
	table.volumes.Remember(place, health.Past{Unreadable: 3, LastRead: "x"})
	file, err := os.Create(filepath.Join(place, "busy")) // opened after couldGo has checked the volume
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		leaving := table.leave(t.Context(), table.heldBy(func(*mounted) bool { return true }))
		if err := leaving.await(t.Context()); err == nil {
			t.Error("it was unmounted with an open file in it")
		}
		leaving.decide(false)
	}
	if past := table.volumes.Past(place, mount.Identity{}); past.Unreadable != 3 {
		t.Errorf("reads that failed\nwant 3\ngot  %d", past.Unreadable)
	}
	file.Close()
	leaving := table.leave(t.Context(), table.heldBy(func(*mounted) bool { return true }))
	if err := leaving.await(t.Context()); err != nil {
		t.Error(err)
	}
	leaving.decide(false) // the storage was unmounted, and is mounted again now
	if past := table.volumes.Past(place, mount.Identity{}); past.Unreadable != 3 {
		t.Errorf("reads that failed, mounted again\nwant 3\ngot  %d", past.Unreadable)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}
