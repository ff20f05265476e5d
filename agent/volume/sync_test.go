package volume

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// Sync waits for the slow disk of a mount that no path leads to, as for any other slow disk.
func TestSlowDiskOutOfSightIsWaitedFor(t *testing.T) {
	mounttest.Alone(t)
	_, dir, server := served(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, 32<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	table := newTable()
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	mounttest.Mount(t, "cover", dir, "tmpfs", 0, "")
	gate := make(chan struct{})
	server.GateWrites(gate)
	go func() { // slower than the longest wait for a silent disk
		defer close(gate)
		pace := time.NewTicker(300 * time.Millisecond)
		defer pace.Stop()
		for range 2 * syncLimit / (300 * time.Millisecond) {
			for was := health.Ended(v.Device.Number); health.Ended(v.Device.Number) == was; {
				select {
				case gate <- struct{}{}:
				case <-t.Context().Done():
					return
				}
			}
			<-pace.C
		}
	}()
	if err := table.Sync(t.Context()); err != nil {
		t.Errorf("want it waited for\ngot  %v", err)
	}
}

// Each filesystem is flushed through a path that leads to it, and not through one that another
// mount covers, whatever the order of mountinfo.
func TestFilesystemIsFlushedByAPathThatLeadsToIt(t *testing.T) {
	mounts, err := mount.Read(strings.NewReader(`22 1 0:2 / / rw - rootfs none rw
40 41 254:0 / /moved rw - xfs /dev/vda rw
41 22 254:16 / /moved rw - xfs /dev/vdb rw
42 22 254:32 / /a/b rw - xfs /dev/vdc rw
43 22 0:30 / /a rw - tmpfs cover rw
44 22 254:32 / /c rw - xfs /dev/vdc rw
45 22 254:48 / /d rw - xfs /dev/vdd rw
46 45 0:31 / /d rw - tmpfs cover rw
47 22 0:50 / /e rw - btrfs /dev/vde rw
`))
	if err != nil {
		t.Fatal(err)
	}
	if want, got := []string{"/moved", "/c", "/e"}, onePathEach(mount.ListOf(mounts)); !slices.Equal(got, want) {
		t.Errorf("want %v\ngot  %v", want, got)
	}
}

// Sync gives up on a disk that ends no request, although its caller would wait.
func TestSyncDoesNotWaitForADiskThatHangs(t *testing.T) {
	mounttest.Alone(t)
	table, dir, server := served(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	server.GateWrites(gate)
	defer close(gate)
	began := time.Now()
	err := table.Sync(t.Context())
	if errkind.Of(err) != errkind.DeadlineExceeded || !strings.Contains(err.Error(), dir) {
		t.Errorf("want a DeadlineExceeded that names %s\ngot  %v", dir, err)
	}
	if took := time.Since(began); took < syncLimit {
		t.Errorf("want it awaited for %v\ngot  %v", syncLimit, took)
	}
}

// While a call waits for the volume's lock, somebody covers the volume: the other filesystem's
// answer says nothing about the volume's writes.
func TestSyncOfAVolumeThatIsCoveredMeanwhileIsNotTheOtherOnes(t *testing.T) {
	dir := mounttest.Dir(t)
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "ext4")), dir, "ext4", 0, "")
	table := newTable()
	v, err := table.Lookup(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Forget(dir)
	v.growing <- struct{}{}
	synced := make(chan error, 1)
	go func() { synced <- table.SyncOne(t.Context(), dir) }()
	waits := func() bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.froze != nil
	}
	for !waits() {
		runtime.Gosched()
	}
	mounttest.Mount(t, "cover", dir, "tmpfs", 0, "")
	v.unlock()
	if err := <-synced; errkind.Of(err) != errkind.NotFound {
		t.Errorf("want a NotFound\ngot  %v", err)
	}
	mounttest.Unmount(t, dir)
	if err := table.SyncOne(t.Context(), dir); err != nil {
		t.Errorf("uncovered\nwant success\ngot  %v", err)
	}
}

// Somebody unmounts the volume and puts a pipe in its place, whose open waits for a writer. The
// volume's lock is held.
func TestFlushDoesNotWaitForAPipeInTheVolumesPlace(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "volume")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(30*time.Second, func() { // then all that wait go on
		if writer, err := os.OpenFile(pipe, os.O_RDWR, 0); err == nil {
			t.Cleanup(func() { writer.Close() })
		}
	})
	v := &Volume{Mountpoint: pipe, FSType: "ext4"}
	v.flush(0)
	if err := v.checkpoint(); errkind.Of(err) != errkind.NotFound {
		t.Errorf("want a NotFound\ngot  %v", err)
	}
	if !late.Stop() {
		t.Error("it has waited for a writer")
	}
}
