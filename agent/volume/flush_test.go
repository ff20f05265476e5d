package volume

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/agent/refusal"
)

// served is a volume on a disk that the test's own server answers for.
func served(t *testing.T) (table *Table, dir string, server *mounttest.Server) {
	t.Helper()
	file, server := mounttest.ServeDisk(t, mounttest.Image(t, "xfs"))
	dir = mounttest.Dir(t)
	mounttest.Mount(t, mounttest.Attach(t, file), dir, "xfs", 0, "")
	table = newTable()
	if err := table.Flush(t.Context(), dir); err != nil { // what mkfs and the mount have left
		t.Fatal(err)
	}
	return table, dir, server
}

// A disk may read and write and take no flush. A filesystem that has nothing to write asks
// it for none, and umount(2) would hang in it, with the volume out of sight.
func TestDiskThatTakesNoFlushIsFoundBeforeTheUnmount(t *testing.T) {
	table, dir, server := served(t)
	release := server.HoldFlushes()
	defer release()
	before := runtime.NumGoroutine()
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		if err := table.Flush(ctx, dir); refusal.KindOf(err) != refusal.DeadlineExceeded {
			t.Errorf("want a DeadlineExceeded\ngot  %v", err)
		}
		cancel()
	}
	if waiting := runtime.NumGoroutine() - before; waiting > 2 { // one for the disk, and the server's for its answer
		t.Errorf("goroutines that wait for the disk and for its server\nwant 2\ngot  %d", waiting)
	}
	release()
	if err := table.Flush(t.Context(), dir); err != nil {
		t.Errorf("when it answers again: %v", err)
	}
}

// Who waits for a flush that began after his call needs no other one.
func TestFlushIsSharedByAllWhoCameBeforeIt(t *testing.T) {
	table, dir, _ := served(t)
	v := table.at(dir)
	was := v.flushes
	v.flush(was - 1)
	if v.flushes != was {
		t.Error("another flush, though one has ended that began after the call")
	}
	v.flush(was)
	if v.flushes != was+1 {
		t.Error("no flush of what was written after the last one began")
	}
}
