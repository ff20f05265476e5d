package health

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// running runs a function of a monitor until the test ends.
func running(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
}

// awaits waits until a channel delivers.
func awaits(t *testing.T, what string, from <-chan struct{}) {
	t.Helper()
	select {
	case <-from:
	case <-time.After(time.Minute):
		t.Fatalf("%s: no look after a minute", what)
	}
}

// The kernel's log is not followed here.
func TestErrorThatAFilesystemReportsIsLookedAt(t *testing.T) {
	target := onDisk(t, "ext4", "errors=continue")
	m := quiet()
	running(t, m.Errors)
	w := m.Watch(target, Past{})
	defer w.End()
	mounttest.Await(t, "the filesystem is added", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.group != nil
	})
	fails(t, target)
	mounttest.Await(t, "the event", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return strings.Contains(w.detail(), unix.EUCLEAN.Error())
	})
	began := time.Now()
	becomes(t, w, Degraded, ReasonRecordedErrors, func() {})
	t.Logf("a condition %v after the event", time.Since(began))
}

// The watch of an earlier agent's volume begins before the events do: then it is added late.
func TestFilesystemIsAddedWhenEventsBegin(t *testing.T) {
	target := onDisk(t, "xfs", "")
	m := quiet()
	w := m.Watch(target, Past{})
	defer w.End()
	if _, err := w.Conditions(t.Context()); err != nil {
		t.Fatal(err)
	}
	running(t, m.Errors)
	mounttest.Await(t, "the filesystem is added", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.fsid != unix.Fsid{}
	})
	if err := unix.Unmount(target.Mountpoint, 0); err != nil {
		t.Errorf("somebody else's unmount\nwant it done\ngot  %v", err)
	}
}

func TestChangeOfAMountIsLookedAt(t *testing.T) {
	target := onDisk(t, "ext4", "")
	m, changes := quiet(), new(mount.Changes)
	top, err := mount.Topmost(target.Mountpoint)
	if err != nil {
		t.Fatal(err)
	}
	w := &Watch{monitor: m, target: target, options: MountOptions(top), poked: make(chan struct{}, 1), moved: make(chan struct{}, 1)}
	m.add(w)
	running(t, func(ctx context.Context) error { m.Mounts(ctx, changes); return nil })
	running(t, changes.Follow)
	mounttest.Await(t, "mounts are followed", func() bool { return changes.Now() > 0 })
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"read-only", func() error { return unix.Mount("", target.Mountpoint, "", unix.MS_REMOUNT|unix.MS_RDONLY, "") }},
		{"read-write", func() error { return unix.Mount("", target.Mountpoint, "", unix.MS_REMOUNT, "") }},
		{"unmounted", func() error { return unix.Unmount(target.Mountpoint, 0) }},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		awaits(t, step.name, w.poked)
		awaits(t, step.name+", of one that waits for a remount", w.moved)
	}
}

// Mounts of others change, and this one does not.
func TestMountThatStaysIsNotLookedAt(t *testing.T) {
	w := &Watch{poked: make(chan struct{}, 1), moved: make(chan struct{}, 1)}
	for _, step := range []struct {
		options string
		want    int
	}{{"rw rw", 0}, {"rw rw", 0}, {"ro rw", 1}, {"", 1}, {"", 0}, {"rw rw", 0}} {
		w.mountedAs(step.options)
		if got := len(w.poked); got != step.want {
			t.Errorf("%+v\ngot  %d", step, got)
		}
		for range len(w.poked) {
			<-w.poked
		}
	}
}

func TestDeviceThatIsGoneIsLookedAt(t *testing.T) {
	m := quiet()
	w := &Watch{monitor: m, target: Target{Device: blockdev.Device{Number: unix.Mkdev(4000, 1)}}, poked: make(chan struct{}, 1)}
	m.add(w)
	running(t, m.Sizes)
	awaits(t, "gone", w.poked)
}

// A change of one of many disks does not make the agent read the sizes of all.
func TestOnlyTheSizeOfTheDeviceThatHasChangedIsRead(t *testing.T) {
	for name, want := range map[string]map[string]bool{
		"vdb":  {"": true, "vdb": true, "vda": false, "vdb1": false},
		"vdb1": {"": true, "vdb": true, "vda": false, "vdb1": true, "vdb2": false},
	} {
		w := &Watch{target: Target{Device: blockdev.Device{Name: name}}}
		for changed, want := range want {
			if got := w.mayBeOn(changed); got != want {
				t.Errorf("%s after a change of %q\nwant it read: %v\ngot  %v", name, changed, want, got)
			}
		}
	}
}

// A call pauses the watch at the moment at which an event ends a wait: the event is not lost.
func TestEventAtTheBeginningOfAPauseIsNotLost(t *testing.T) {
	w := &Watch{poked: make(chan struct{}, 1), doubted: make(chan struct{}, 1), moved: make(chan struct{}, 1), target: Target{}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		w.poke()
		if why := w.wait(ctx, time.Hour, w.poked); why != over || len(w.poked) != 1 {
			t.Fatalf("want it over, and the event kept\ngot  %v, %d events", why, len(w.poked))
		}
	}
}

func TestExt4ShutdownIsReadFromItsMount(t *testing.T) {
	target := onDisk(t, "ext4", "")
	dir, err := os.Open(target.Mountpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	const shutdown = 0x8004587d // EXT4_IOC_SHUTDOWN, with the flag for no log flush
	if err := unix.IoctlSetPointerInt(int(dir.Fd()), shutdown, 2); err != nil {
		t.Fatal(err)
	}
	if top, err := mount.Topmost(target.Mountpoint); err != nil || !hasOption(top.VFSOptions, "shutdown") {
		t.Skipf("this kernel does not show it (%+v, error %v): run it on Linux 6.13 or newer", top, err)
	}
	finds(t, target, Inaccessible, ReasonShutdown)
}
