package health

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount"
)

// someDevice returns the number of a block device of this machine.
func someDevice(t *testing.T) uint64 {
	t.Helper()
	all, err := os.ReadDir("/sys/dev/block")
	if err != nil || len(all) == 0 {
		t.Skip("it needs a block device: run it where /sys/class/block has one, as in a VM")
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(all[0].Name(), "%d:%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return unix.Mkdev(major, minor)
}

// small mounts a tmpfs of a few pages. A watch treats it as an ext4 whose disk answers at once.
func small(t *testing.T) Target {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("small", dir, "tmpfs", 0, "size=64k"); errors.Is(err, unix.EPERM) {
		t.Skipf("it mounts a tmpfs: run it as root, with sudo go test -run '^%s$'", t.Name())
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	top, err := mount.Topmost(dir)
	if err != nil {
		t.Fatal(err)
	}
	return Target{Mountpoint: dir, FSType: "ext4", Mount: mount.Identify(top),
		Device: blockdev.Device{Path: "/dev/none", Name: "none", Number: someDevice(t)}}
}

// fill writes to a file of small's volume until it is full.
func fill(t *testing.T, file string) {
	t.Helper()
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("want it full\ngot  %v", err)
	}
}

// quiet returns a monitor whose log nobody reads.
func quiet() *Monitor {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return NewMonitor(logrus.NewEntry(log))
}

// owned watches a volume of the agent until the test has ended.
func owned(t *testing.T, target Target) *Watch {
	w := quiet().Watch(target, Past{})
	t.Cleanup(w.End)
	w.Own()
	return w
}

// An ordinary buffered writer writes in bursts, and each time writing stops the disk is in doubt.
// Checking the disk then must not delay the next examination.
func TestVolumeThatIsWrittenToInBurstsIsExamined(t *testing.T) {
	for _, period := range []int{0, 2, 3, 5, 6} { // seconds; 0 means idle
		target := small(t)
		file := filepath.Join(target.Mountpoint, "full")
		synctest.Test(t, func(t *testing.T) {
			w := owned(t, target)
			var c counts
			beats := func(n int) {
				for i := range n {
					if period > 0 && i%period == 0 {
						c.writes += ownWrites + 1
					}
					w.beat(c, true)
					time.Sleep(beatInterval)
				}
			}
			longest := int((idleInterval+sickInterval)/beatInterval) + 3
			says := func(when string, want ...string) {
				t.Helper()
				var got []string
				now, _ := w.Latest()
				for _, condition := range now {
					got = append(got, condition.Reason)
				}
				if fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("written to every %d s, %d s after it %s\nwant %v\ngot  %v", period, longest, when, want, got)
				}
			}
			beats(3)
			fill(t, file)
			beats(longest)
			says("got full", ReasonOutOfSpace)
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			beats(longest)
			says("had room again")
			w.note(func() { w.slow = true })
			beats(longest)
			says("was slow once")
		})
	}
}

// A volume that nobody writes to and nobody asks about is examined less and less often. Who asks
// gets an answer that is as new as in the beginning, the next time.
func TestVolumeThatNobodyAsksAboutIsExaminedLessOften(t *testing.T) {
	target := small(t)
	file := filepath.Join(target.Mountpoint, "full")
	synctest.Test(t, func(t *testing.T) {
		w := owned(t, target)
		says := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			if now, _ := w.Latest(); len(now) != want {
				t.Errorf("%s\nwant %d conditions\ngot  %v", when, want, now)
			}
		}
		time.Sleep(3*settleInterval + (1+idleFactor)*idleInterval + sickInterval) // two looks
		fill(t, file)
		time.Sleep(3 * idleInterval)
		says("nobody has asked", 0)
		w.Asked()
		says("somebody has asked", 1)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		time.Sleep(sickInterval + 2*settleInterval)
		says("healthy again", 0)
		for range 3 {
			w.Asked()
			fill(t, file)
			w.Asked()
			says("somebody asks at once again", 0)
			time.Sleep(idleInterval)
			w.Asked()
			says("somebody asks after the interval", 1)
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			time.Sleep(sickInterval + 2*settleInterval)
		}
	})
}

// A volume has little space, which is no fault of its disk. Nobody writes to it or asks about it
// for hours, as far as its disk shows: then the end of that is still found after idleInterval.
func TestEndOfLowSpaceIsFoundHoweverLongItLasted(t *testing.T) {
	target := small(t)
	file := filepath.Join(target.Mountpoint, "file")
	if err := os.WriteFile(file, make([]byte, 56<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		m := quiet()
		m.Low = Thresholds{Space: MaxThreshold}
		w := m.Watch(target, Past{})
		defer w.End()
		time.Sleep(idleLongest)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		before, _ := w.Latest()
		time.Sleep(idleInterval + settleInterval)
		synctest.Wait()
		if now, _ := w.Latest(); len(before) != 1 || len(now) != 0 {
			t.Errorf("want one condition, then none\ngot  %v, then %v", before, now)
		}
	})
}

// An examination is asked for, and at the same moment a call ends the goroutine that waits: the
// next one looks.
func TestRequestForAnExaminationIsNotLostAtAPause(t *testing.T) {
	w := &Watch{written: make(chan struct{}, 1)}
	w.giveBack(wanted, false)
	select {
	case <-w.written:
	default:
		t.Error("it is lost")
	}
}

// Whoever asks waits for an examination only if the last one is old, and the next one can begin.
func TestNobodyWaitsForAnExaminationThatMayTakeLong(t *testing.T) {
	for name, set := range map[string]func(*Watch){
		"before the first":       func(w *Watch) { w.activity.at = time.Time{} },
		"after a late one":       func(w *Watch) { w.activity.at = time.Now() },
		"the disk was slow":      func(w *Watch) { w.slow = true },
		"the disk hangs":         func(w *Watch) { w.stall.beats = hungBeats },
		"a call has paused it":   func(w *Watch) { w.paused.Store(true) },
		"its mount is unmounted": func(w *Watch) { w.ended.Store(true) },
		"":                       func(*Watch) {},
	} {
		w := &Watch{written: make(chan struct{}, 1), activity: activity{at: time.Now().Add(-idleInterval)}}
		set(w)
		if look := w.Asked(); (look != nil) != (name == "") {
			t.Errorf("%q\nwant somebody to wait: %v\ngot  %v", name, name == "", look != nil)
		}
	}
}

// However many lines about a disk the kernel logs, its filesystem is examined at most once per
// settleInterval, because each examination may cause lines itself.
func TestExaminationsAreAnIntervalApart(t *testing.T) {
	target := small(t)
	file := filepath.Join(target.Mountpoint, "full")
	synctest.Test(t, func(t *testing.T) {
		w := owned(t, target)
		synctest.Wait() // the first look is over
		fill(t, file)
		const tick = settleInterval / 10
		for waited := tick; waited < settleInterval+2*tick; waited += tick {
			w.poke()
			time.Sleep(tick)
			synctest.Wait()
			now, _ := w.Latest()
			if isBehind := waited > settleInterval; waited != settleInterval && isBehind != (len(now) == 1) {
				t.Errorf("%v after the last examination\nwant another one: %v\ngot  %v", waited, isBehind, now)
			}
		}
	})
}

// An event that no examination causes, such as an error of the filesystem, is looked at before
// settleInterval is over if the volume was healthy, but only twice in a row.
func TestEventOnAHealthyVolumeIsLookedAtBeforeTheIntervalIsOver(t *testing.T) {
	target := small(t)
	file := filepath.Join(target.Mountpoint, "full")
	synctest.Test(t, func(t *testing.T) {
		w := owned(t, target)
		says := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			if now, _ := w.Latest(); len(now) != want {
				t.Errorf("%s\nwant %d conditions\ngot  %v", when, want, now)
			}
		}
		says("at first", 0)
		time.Sleep(settleInterval + settleInterval/2) // the look after Own is over, too
		fill(t, file)
		w.hurry()
		says("an event", 1)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		w.hurry()
		says("one on a volume with a condition", 1)
		time.Sleep(settleInterval)
		says("after the interval", 0)
		w.hurry()
		says("one at once", 0)
		time.Sleep(showInterval)
		says("and once more", 0)
		fill(t, file)
		w.hurry()
		time.Sleep(2 * showInterval)
		says("the third one in a row", 0)
		time.Sleep(settleInterval)
		says("after its interval", 1)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	})
}

// The kernel reports a fault before it shows, such as the error that makes an ext4 stop before the
// ext4 has recorded it.
func TestFaultThatShowsAfterItsEventIsLookedAtSoon(t *testing.T) {
	target := small(t)
	file := filepath.Join(target.Mountpoint, "full")
	synctest.Test(t, func(t *testing.T) {
		w := owned(t, target)
		time.Sleep(settleInterval + settleInterval/2) // the look after Own is over, too
		w.hurry()
		synctest.Wait()
		fill(t, file)
		time.Sleep(showInterval)
		synctest.Wait()
		if now, _ := w.Latest(); len(now) != 1 {
			t.Errorf("%v after the event\nwant a condition\ngot  %v", showInterval, now)
		}
	})
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
}

// A failed request in the kernel's log is such an event, and other lines are none: an examination
// may cause them.
func TestFailedRequestOfAHealthyVolumeIsLookedAtBeforeTheIntervalIsOver(t *testing.T) {
	for text, want := range map[string]bool{
		"I/O error, dev vda, sector 8 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2":  true,
		"I/O error, dev vda, sector 8 op 0x0:(READ) flags 0x800 phys_seg 1 prio class 2":   true,
		"EXT4-fs (vda): Remounting filesystem read-only":                                   true,
		"vda: writeback error on inode 131, offset 1048576, sector 2240":                   true,
		"Buffer I/O error on device vda, logical block 10241":                              true,
		"EXT4-fs warning (device vda): ext4_end_bio:343: I/O error 10 writing to inode 12": true,
		"XFS (vda): metadata I/O error in \"xfs_buf_ioend\" at daddr 0x8 len 8 error 5":    true,
		"EXT4-fs (vda): mounted filesystem":                                                false,
	} {
		target := small(t)
		file := filepath.Join(target.Mountpoint, "full")
		synctest.Test(t, func(t *testing.T) {
			w := owned(t, target)
			time.Sleep(settleInterval + settleInterval/2) // the look after Own is over, too
			fill(t, file)
			w.hear(parseLine([]byte(text)), []byte(text))
			synctest.Wait()
			if now, _ := w.Latest(); want != (len(now) > 0) {
				t.Errorf("at once after %q\nwant a condition: %v\ngot  %v", text, want, now)
			}
		})
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
}

// A Pause between two looks keeps a watch from the next look. Resume does not start another
// goroutine, unless the watch was ended meanwhile.
func TestWatchExaminesNothingDuringAPause(t *testing.T) {
	target := small(t)
	file := filepath.Join(target.Mountpoint, "full")
	synctest.Test(t, func(t *testing.T) {
		w := owned(t, target)
		says := func(when string, want int) {
			t.Helper()
			time.Sleep(2 * idleInterval)
			if got, _ := w.Latest(); len(got) != want {
				t.Errorf("%s\nwant %d conditions\ngot  %v", when, want, got)
			}
		}
		pause := func() {
			t.Helper()
			if err := w.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		says("at first", 0)
		began := w.done
		pause()
		fill(t, file)
		w.poke()
		says("full, in a pause", 0)
		w.Resume()
		says("behind the pause", 1)
		if w.done != began {
			t.Error("another goroutine looks")
		}
		pause()
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		w.End()
		synctest.Wait()
		w.Again()
		says("ended and begun again in a pause", 1)
		w.Resume()
		says("behind that", 0)
	})
}

// A disk's contents beyond an earlier end may be lost, although the disk has its size again.
func TestDiskThatWasSmallerStaysACondition(t *testing.T) {
	w := &Watch{monitor: NewMonitor(nil), target: Target{FSType: "ext4", Device: blockdev.Device{Path: "/dev/vda"}}}
	now := []Condition{{Status: Inaccessible, Reason: ReasonDeviceTooSmall, Message: "x"}}
	w.saw(now)
	if got := w.remember(now); fmt.Sprint(got) != fmt.Sprint(now) {
		t.Errorf("while it is smaller\nwant %v\ngot  %v", now, got)
	}
	got := w.remember(nil)
	got = w.remember(got) // nothing new is known
	if len(got) != 1 || got[0].Status != Degraded || got[0].Reason != ReasonPastDeviceTooSmall {
		t.Errorf("with its size again\nwant it remembered once\ngot  %v", got)
	}
	after := &Watch{monitor: w.monitor, target: w.target, poked: make(chan struct{}, 1)}
	after.Remember(w.Past())
	if again := after.remember(nil); fmt.Sprint(again) != fmt.Sprint(got) {
		t.Errorf("after the agent's restart\nwant %v\ngot  %v", got, again)
	}
}

// A condition that stays because nothing new is known was not seen again: the time at which it was
// last seen stays, and nothing is saved.
func TestConditionThatStaysWasNotSeenAgain(t *testing.T) {
	for name, f := range map[string]finding{"refused": {refused: true}, "failed": {failure: unix.ENOMEM}} {
		for reason, when := range map[string]func(Past) time.Time{
			ReasonIOError:        func(p Past) time.Time { return p.Failed },
			ReasonDeviceTooSmall: func(p Past) time.Time { return p.Smaller },
		} {
			w := &Watch{monitor: quiet(), looked: make(chan struct{})}
			look := func(f finding) Past {
				w.inFlight = w.newExamination(false)
				w.took(f)
				return w.Past()
			}
			seen := look(finding{conditions: []Condition{{Status: Inaccessible, Reason: reason, Message: "x"}}})
			<-w.monitor.Remembers()
			if later := look(f); !when(later).Equal(when(seen)) || when(seen).IsZero() {
				t.Errorf("%s, %s\nwant it seen at %v\ngot  %v", name, reason, when(seen), when(later))
			}
			if len(w.monitor.Remembers()) > 0 {
				t.Errorf("%s, %s: it is saved", name, reason)
			}
		}
	}
}

// A probe is refused, for instance because somebody has made the root directory immutable. Nobody
// has seen then that writes work again or that there is room. All other conditions are those of
// this examination.
func TestRefusedProbeKeepsTheConditionsOfAProbe(t *testing.T) {
	w := &Watch{monitor: quiet(), looked: make(chan struct{}), target: Target{FSType: "ext4", Device: blockdev.Device{Path: "/dev/vda"}}}
	one := func(status Status, reason string) Condition {
		return Condition{Status: status, Reason: reason, Message: "x"}
	}
	for _, step := range []struct {
		found finding
		want  []string
	}{
		{finding{conditions: []Condition{one(Degraded, ReasonOutOfSpace)}}, []string{ReasonOutOfSpace}},
		{finding{refused: true, conditions: []Condition{one(Degraded, ReasonRecordedErrors)}}, []string{ReasonRecordedErrors, ReasonOutOfSpace}},
		{finding{refused: true}, []string{ReasonOutOfSpace}},
		{finding{}, nil},
		{finding{conditions: []Condition{one(Inaccessible, ReasonIOError)}}, []string{ReasonIOError}},
		{finding{refused: true}, []string{ReasonIOError}},
		{finding{}, []string{ReasonPastIOError}},
		{finding{refused: true}, []string{ReasonPastIOError}},
	} {
		w.inFlight = w.newExamination(false)
		w.took(step.found)
		now, _ := w.Latest()
		var got []string
		for _, c := range now {
			got = append(got, c.Reason)
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("%+v\nwant %v\ngot  %v", step.found, step.want, got)
		}
	}
}

// A condition that stays has the time of its beginning, whatever its message says by now; one that
// was gone has a new one.
func TestConditionsKeepTheTimeOfTheirBeginning(t *testing.T) {
	first, later := time.Unix(1, 0), time.Unix(2, 0)
	slow := Condition{Status: Degraded, Reason: ReasonIOSlow, Message: "x"}
	before := dated([]Condition{slow}, nil, first)
	slow.Message = "y"
	full := Condition{Status: Degraded, Reason: ReasonOutOfSpace}
	now := dated([]Condition{slow, full, slow}, before, later)
	if len(now) != 2 || !now[0].Since.Equal(first) || now[0].Message != "y" || !now[1].Since.Equal(later) {
		t.Errorf("want IOSlow since %v and OutOfSpace since %v\ngot  %+v", first, later, now)
	}
	if again := dated(dated(nil, now, later), nil, later); len(again) != 0 {
		t.Errorf("want none\ngot  %+v", again)
	}
	var many []Condition
	for i := range maxConditions + 1 {
		many = append(many, Condition{Status: Degraded, Reason: fmt.Sprint(i)})
	}
	if got := len(dated(many, nil, first)); got != maxConditions {
		t.Errorf("want %d\ngot  %d", maxConditions, got)
	}
}

// A write to a frozen filesystem waits for the thaw, which is no fault of its disk.
func TestFrozenVolumeIsNotWrittenTo(t *testing.T) {
	target := small(t)
	fill(t, filepath.Join(target.Mountpoint, "file"))
	var frozen atomic.Bool
	frozen.Store(true)
	target.Frozen = frozen.Load
	w := owned(t, target)
	if f := w.examine(false); len(f.conditions) > 0 || f.failure != nil {
		t.Errorf("frozen\nwant no write, which would find it full\ngot  %v, failure %v", f.conditions, f.failure)
	}
	frozen.Store(false)
	if f := w.examine(false); len(f.conditions) != 1 || f.conditions[0].Reason != ReasonOutOfSpace {
		t.Errorf("thawed\nwant it found full\ngot  %v", f.conditions)
	}
}
