package health

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

func TestLowConditionEndsAQuarterAboveItsThreshold(t *testing.T) {
	const total = 1 << 50
	percent := func(p uint64) uint64 { return total / 100 * p }
	was := false
	for _, step := range []struct {
		available uint64
		want      bool
	}{
		{total, false}, {percent(8) + 100, false}, {percent(8) - 100, true}, {percent(9), true}, {percent(10) - 100, true}, {percent(10) + 100, false},
		{percent(9), false}, {0, true}, {percent(8) + 100, true}, {total, false},
	} {
		if was = isLow(step.available, total, 8, was); was != step.want {
			t.Errorf("%d of %d\nwant it low: %v\ngot  %v", step.available, total, step.want, was)
		}
	}
	if isLow(0, total, 0, false) || isLow(0, 0, MaxThreshold, true) {
		t.Error("low without a threshold, or without a total")
	}
}

// lowOf looks at a watch's target, and returns the reasons of its low conditions.
func lowOf(t *testing.T, w *Watch) (reasons []string) {
	t.Helper()
	f := examine(w.target, true, false)
	readSpace(w.target, &f)
	for _, c := range w.low(f) {
		if strings.ContainsAny(strings.TrimPrefix(c.Message, w.target.FSType+" on "+w.target.Device.Path+": less than 20 %"), "0123456789") {
			t.Errorf("want no figure but the threshold\ngot  %s", c.Message)
		}
		reasons = append(reasons, c.Reason)
	}
	return reasons
}

func TestVolumeWithLittleSpaceOrFewInodesIsDegraded(t *testing.T) {
	target := onDisk(t, "ext4", "")
	monitor := NewMonitor(logrus.NewEntry(logrus.New()))
	w := &Watch{monitor: monitor, target: target}
	want := func(when string, want ...string) {
		t.Helper()
		if got := lowOf(t, w); !slices.Equal(got, want) {
			t.Errorf("%s\nwant %v\ngot  %v", when, want, got)
		}
	}
	var s unix.Statfs_t
	if err := unix.Statfs(target.Mountpoint, &s); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(target.Mountpoint, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(s.Bavail-s.Blocks/10)*s.Bsize); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	want("without thresholds")
	monitor.Low = Thresholds{Space: 20, Inodes: 20}
	want("a tenth is available", ReasonLowSpace)
	if err := unix.Mount("", target.Mountpoint, "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	want("read-only")
	if err := unix.Mount("", target.Mountpoint, "", unix.MS_REMOUNT|unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 0); err != nil {
		t.Fatal(err)
	}
	want("it has room")
	few := &Watch{monitor: monitor, target: onImage(t, mounttest.Image(t, "ext4", "-N", "64"), "ext4", "")}
	for n := 0; err == nil; n++ {
		err = os.WriteFile(filepath.Join(few.target.Mountpoint, fmt.Sprint(n)), nil, 0o600)
	}
	if got := lowOf(t, few); !slices.Equal(got, []string{ReasonLowInodes}) {
		t.Errorf("without inodes\nwant %s\ngot  %v", ReasonLowInodes, got)
	}
}

// A volume that is nearly full has no fault: its watch looks no more often.
func TestWatchReportsLittleSpaceAndItsEnd(t *testing.T) {
	target := onDisk(t, "ext4", "")
	log := logrus.New()
	log.SetOutput(io.Discard)
	monitor := NewMonitor(logrus.NewEntry(log))
	monitor.Low = Thresholds{Space: MaxThreshold}
	file, err := os.Create(filepath.Join(target.Mountpoint, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := unix.Fallocate(int(file.Fd()), 0, 0, 200<<20); err != nil {
		t.Fatal(err)
	}
	w := monitor.Watch(target, Past{})
	defer monitor.End()
	has := func() bool {
		found, err := w.Conditions(t.Context())
		return err == nil && slices.ContainsFunc(found, func(c Condition) bool { return c.Reason == ReasonLowSpace && !c.Since.After(time.Now()) })
	}
	if !has() {
		t.Errorf("want %s\ngot  none", ReasonLowSpace)
	}
	if err := file.Truncate(0); err != nil {
		t.Fatal(err)
	}
	w.poke()
	mounttest.Await(t, "the condition to end", func() bool { return !has() })
}
