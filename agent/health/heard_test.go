package health

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

// heard returns a monitor that follows the kernel's log until the test ends.
func heard(t *testing.T) *Monitor {
	t.Helper()
	m := quiet()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	select {
	case <-m.Remembers(): // Run has reached the end of the log
	case err := <-ended:
		ended <- err
		t.Skipf("it reads /dev/kmsg: %v: run it as root", err)
	}
	return m
}

// becomes waits until a watch has a condition, and provokes it again and again, because the kernel
// drops lines of its log if others, of any device, come too fast.
func becomes(t *testing.T, w *Watch, status Status, reason string, provoke func()) {
	t.Helper()
	look, again := time.NewTicker(10*time.Millisecond), time.NewTicker(6*time.Second) // DEFAULT_RATELIMIT_INTERVAL is 5
	defer look.Stop()
	defer again.Stop()
	provoke()
	for limit := time.After(2 * time.Minute); ; {
		now, _ := w.Latest()
		if slices.ContainsFunc(now, func(c Condition) bool { return c.Status == status && c.Reason == reason }) {
			return
		}
		select {
		case <-look.C:
		case <-again.C:
			provoke()
		case <-limit:
			t.Fatalf("after two minutes\nwant %v %s\ngot  %v", status, reason, now)
		}
	}
}

// The disk becomes smaller than its filesystem and gets its size back before the next look: only
// the kernel's log has both changes.
func TestDiskThatWasSmallerBetweenTwoLooksIsRemembered(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		image := mounttest.Image(t, fstype)
		info, err := os.Stat(image)
		if err != nil {
			t.Fatal(err)
		}
		target := onImage(t, image, fstype, "")
		w := heard(t).Watch(target, Past{})
		defer w.End()
		if now, err := w.Conditions(t.Context()); len(now) > 0 || err != nil {
			t.Fatalf("%s, at first\nwant nothing wrong\ngot  %v, error %v", fstype, now, err)
		}
		becomes(t, w, Degraded, ReasonPastDeviceTooSmall, func() {
			if err := w.Pause(t.Context()); err != nil { // the watch sees only the last size
				t.Fatal(err)
			}
			for _, size := range []int64{2 * info.Size(), info.Size() / 2, info.Size()} {
				mounttest.SetSize(t, target.Device.Path, image, size)
			}
			w.Resume()
		})
	}
}

// The kernel drops lines about sizes if they come too fast, but sends a uevent each time. Here the
// kernel's log is not read at all.
func TestDiskThatWasSmallerIsRememberedWithoutTheLog(t *testing.T) {
	image := mounttest.Image(t, "ext4")
	info, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	m := quiet()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Sizes(ctx) }()
	defer func() { cancel(); <-ended }()
	target := onImage(t, image, "ext4", "")
	w := m.Watch(target, Past{})
	defer w.End()
	if now, err := w.Conditions(t.Context()); len(now) > 0 || err != nil {
		t.Fatalf("at first\nwant nothing wrong\ngot  %v, error %v", now, err)
	}
	becomes(t, w, Degraded, ReasonPastDeviceTooSmall, func() {
		if err := w.Pause(t.Context()); err != nil { // the watch itself sees only the last size
			t.Fatal(err)
		}
		mounttest.SetSize(t, target.Device.Path, image, info.Size()/2)
		select {
		case <-m.Remembers():
		case err := <-ended:
			ended <- err
			t.Fatal(err)
		case <-time.After(time.Second): // then once more: Sizes may have begun later
		}
		mounttest.SetSize(t, target.Device.Path, image, info.Size())
		w.Resume()
	})
}

// Sizes are compared with the filesystem's end as it was found last. A size that is not known, or
// one before the end is known, says nothing.
func TestSizeIsComparedWithTheFilesystemsEnd(t *testing.T) {
	for _, c := range []struct {
		end, sectors uint64
		want         bool
	}{
		{0, 1, false}, {1 << 20, 0, false}, {1 << 20, 2047, true}, {1 << 20, 2048, false}, {1 << 20, 2049, false},
	} {
		w := &Watch{monitor: NewMonitor(nil), poked: make(chan struct{}, 1), end: c.end}
		w.measure(func() uint64 { return c.sectors })
		if past := w.Past(); past.Smaller.IsZero() == c.want {
			t.Errorf("%+v\ngot  %+v", c, past)
		}
	}
}

// The disk's size is read, and before it is compared the disk and the filesystem grow, and an
// examination finds the filesystem's new end.
func TestSizeFromBeforeAGrowthIsNotComparedWithTheNewEnd(t *testing.T) {
	w := &Watch{monitor: NewMonitor(nil), poked: make(chan struct{}, 1), end: 1 << 20}
	w.measure(func() uint64 {
		w.ends(2 << 20)
		return 1 << 20 / sectorBytes
	})
	if past := w.Past(); !past.Smaller.IsZero() {
		t.Errorf("want nothing remembered\ngot  %+v", past)
	}
}

// A disk that was larger and has its size again never ended before its filesystem.
func TestShrinkAboveTheFilesystemsEndIsNotReported(t *testing.T) {
	w := &Watch{monitor: NewMonitor(nil), poked: make(chan struct{}, 1), looked: make(chan struct{}), end: 1 << 20, target: Target{FSType: "ext4"}}
	for text, want := range map[string]struct{ smaller, remember bool }{
		"vda: detected capacity change from 4096 to 2048":             {false, true}, // still the size of the filesystem
		"vda: detected capacity change from 4096 to 2049":             {false, true},
		"vda: detected capacity change from 2048 to 2047":             {true, true},
		"vda: detected capacity change from 2048 to 0":                {}, // its size is not known
		"vda: detected capacity change from 0 to 99999999":            {},
		"vda: detected capacity change from 1024 to 2047":             {}, // an earlier growth, read late
		"vda: detected capacity change from 1 to 2 and on":            {},
		"vda: detected capacity change from 1 to 1844674407370955162": {}, // its size in bytes overflows
	} {
		w.past = Past{}
		if remember := w.hear(parseLine([]byte(text)), []byte(text)); remember != want.remember || w.past.Smaller.IsZero() == want.smaller {
			t.Errorf("%q\nwant smaller: %v, remembered: %v\ngot  %+v, %v", text, want.smaller, want.remember, w.past, remember)
		}
	}
}

// A shrink is read before the filesystem's end is known. Whatever the comparison says then, it is
// saved: the next agent reads the log from there.
func TestShrinkIsSavedWhenItIsCompared(t *testing.T) {
	const text = "vda: detected capacity change from 4096 to 2048"
	for end, smaller := range map[uint64]bool{1 << 20: false, 2 << 20: true} {
		w := &Watch{monitor: NewMonitor(nil), poked: make(chan struct{}, 1)}
		if w.hear(parseLine([]byte(text)), []byte(text)) {
			t.Error("a save is asked for before the shrink can be compared: it would be lost by a restart")
		}
		w.ends(end)
		select {
		case <-w.monitor.Remembers():
		default:
			t.Errorf("a filesystem that ends at %d: no save is asked for", end)
		}
		if got := !w.Past().Smaller.IsZero(); got != smaller {
			t.Errorf("a filesystem that ends at %d\nwant smaller: %v\ngot  %v", end, smaller, got)
		}
	}
}

// A disk with more than its filesystem needs becomes smaller, and still has enough. Then both grow,
// and the agent restarts. The next agent does not read the shrink again.
func TestShrinkBeforeAGrowthIsNoFaultAfterARestart(t *testing.T) {
	const text = "vda: detected capacity change from 4096 to 3072"
	first := &Watch{monitor: NewMonitor(nil), poked: make(chan struct{}, 1), end: 2048 * sectorBytes}
	saved := first.hear(parseLine([]byte(text)), []byte(text)) // and with it the record's number
	next := &Watch{monitor: NewMonitor(nil), poked: make(chan struct{}, 1), past: first.Past()}
	if !saved {
		next.hear(parseLine([]byte(text)), []byte(text))
	}
	next.ends(8192 * sectorBytes)
	if past := next.Past(); past != (Past{}) {
		t.Errorf("want nothing remembered\ngot  %+v", past)
	}
}

// A disk with more than its filesystem needs became smaller, still had enough, and both have grown
// since. The line about that shrink is read only now: by this agent, or by the next one.
func TestShrinkThatIsReadAfterAGrowthIsNoFault(t *testing.T) {
	const text = "vda: detected capacity change from 4096 to 3072"
	for name, begun := range map[string]bool{"the same agent": true, "the next agent": false} {
		w := &Watch{monitor: NewMonitor(nil), poked: make(chan struct{}, 1)}
		if begun {
			w.ends(8192 * sectorBytes)
		}
		w.hear(parseLine([]byte(text)), []byte(text))
		w.ends(8192 * sectorBytes)
		if past := w.Past(); past != (Past{}) {
			t.Errorf("%s\nwant nothing remembered\ngot  %+v", name, past)
		}
	}
}

// A failed read is reported as long as the filesystem stays mounted: only the kernel's log has it,
// and the next read may be answered from memory.
func TestFailedReadIsACondition(t *testing.T) {
	image := mounttest.Image(t, "xfs")
	info, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	target := onImage(t, image, "xfs", "")
	w := heard(t).Watch(target, Past{})
	defer w.End()
	if now, err := w.Conditions(t.Context()); len(now) > 0 || err != nil {
		t.Fatalf("at first\nwant nothing wrong\ngot  %v, error %v", now, err)
	}
	becomes(t, w, Degraded, ReasonReadError, func() {
		if err := os.Truncate(image, info.Size()/2); err != nil { // the loop device keeps its size
			t.Fatal(err)
		}
		readFails(t, target.Device.Path, info.Size()/2)
		if err := os.Truncate(image, info.Size()); err != nil {
			t.Fatal(err)
		}
	})
	if past := w.Past(); past.Unreadable == 0 || parseLine([]byte(past.LastRead)).device != target.Device.Name {
		t.Errorf("remembered\nwant the kernel's line about %s\ngot  %+v", target.Device.Name, past)
	}
}

// readFails reads a disk at a position where a read must fail.
func readFails(t *testing.T, disk string, at int64) {
	t.Helper()
	fd, err := unix.Open(disk, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	page, err := unix.Mmap(-1, 0, probeBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page)
	if n, err := unix.Pread(fd, page, at); err == nil {
		t.Fatalf("%d bytes were read", n)
	}
}

// Somebody has made the root directory immutable (chattr +i): no probe can write there, but files
// in it can be written. The mount is watched like somebody else's.
func TestRootThatRefusesFilesIsNoFault(t *testing.T) {
	target := onDisk(t, "ext4", "errors=continue")
	mounttest.Run(t, "chattr", "+i", target.Mountpoint)
	defer mounttest.Run(t, "chattr", "-i", target.Mountpoint)
	if f := examine(target, true, false); f.failure != nil || len(f.conditions) > 0 || !f.refused {
		t.Errorf("want nothing wrong, and the refusal\ngot  %+v", f)
	}
	if f := examine(target, false, false); f.refused {
		t.Errorf("somebody else's mount\nwant no refusal\ngot  %+v", f)
	}
	w := heard(t).Watch(target, Past{})
	defer w.End()
	w.Own()
	becomes(t, w, Degraded, ReasonRecordedErrors, func() { fails(t, target) })
}
