package volume

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// served mounts a volume on a disk whose requests the test's own server answers.
func served(t *testing.T) (table *Table, dir string, server *mounttest.Server) {
	t.Helper()
	file, server := mounttest.ServeDisk(t, mounttest.Image(t, "xfs"))
	dir = mounttest.Dir(t)
	mounttest.Mount(t, mounttest.Attach(t, file), dir, "xfs", 0, "")
	table = newTable()
	if err := table.Flush(t.Context(), dir); err != nil { // writes what mkfs and the mount have left
		t.Fatal(err)
	}
	return table, dir, server
}

// A disk may read and write but hang in a flush. A filesystem with nothing to write sends it no
// flush, so umount(2) would hang in the flush, with the volume out of sight.
func TestDiskThatTakesNoFlushIsFoundBeforeTheUnmount(t *testing.T) {
	table, dir, server := served(t)
	release := server.HoldFlushes()
	defer release()
	before := runtime.NumGoroutine()
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		if err := table.Flush(ctx, dir); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Errorf("want a DeadlineExceeded\ngot  %v", err)
		}
		cancel()
	}
	if waiting := runtime.NumGoroutine() - before; waiting > 2 { // one waits for the disk, and one of the server for its answer
		t.Errorf("goroutines that wait for the disk and for its server\nwant 2\ngot  %d", waiting)
	}
	release()
	if err := table.Flush(t.Context(), dir); err != nil {
		t.Errorf("when it answers again: %v", err)
	}
}

// A flush that began after a call serves that call, too.
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

// The error of a call whose time is over says whether the disk still ends requests.
func TestSlowDiskIsNotReportedAsHung(t *testing.T) {
	table, dir, server := served(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	defer open()
	server.GateWrites(gate)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		slowly := time.NewTicker(lookAfter / 2)
		defer slowly.Stop()
		was := uint64(math.MaxUint64) // the count when the call has looked for the first time
		for i := 0; was >= health.Ended(table.at(dir).Device.Number); i++ {
			<-slowly.C
			if i == 15 {
				was = health.Ended(table.at(dir).Device.Number)
			}
			gate <- struct{}{}
		}
	}()
	if err := table.Flush(ctx, dir); errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), "is slow: it has completed") {
		t.Errorf("want a DeadlineExceeded, and the disk slow\ngot  %v", err)
	}
	open()
	if err := table.Flush(t.Context(), dir); err != nil {
		t.Errorf("joins the flush in progress: %v", err)
	}
}

func TestErrorSaysHowADiskAnswers(t *testing.T) {
	for want, got := range map[string]string{
		"hangs":                      answers(true, 5, 9*time.Second),
		"has not answered meanwhile": answers(false, 0, 0),
		"has completed 1 requests meanwhile, but none for 9s": answers(false, 1, 9*time.Second), // its flush may hang
		"is slow: it has completed 7 requests meanwhile":      answers(false, 7, 0),
	} {
		if got != want {
			t.Errorf("want %q\ngot  %q", want, got)
		}
	}
}
