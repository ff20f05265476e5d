package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
)

func newTable() *Table {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return NewTable(health.NewMonitor(logrus.NewEntry(log)))
}

func TestPathThatIsNoVolumeIsRefusedByName(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]errkind.Kind{
		"": errkind.InvalidArgument, "proc": errkind.InvalidArgument, dir: errkind.InvalidArgument,
		dir + "/nothing": errkind.NotFound, "/proc/version/below": errkind.NotFound, "/" + strings.Repeat("x", 5000): errkind.NotFound,
		"/proc\x00": errkind.InvalidArgument,
	} {
		_, err := newTable().Lookup(path)
		if err == nil || errkind.Of(err) != want || !strings.Contains(err.Error(), strings.Trim(fmt.Sprintf("%.100q", path), `"`)) {
			t.Errorf("%.50q\nwant kind %v and the path\ngot  %v", path, want, err)
		}
	}
}

// /proc is mounted on every host, has no block device, and stays mounted.
func TestMountWithoutADeviceIsAVolumeThatCannotGrow(t *testing.T) {
	table := newTable()
	v, err := table.Lookup("/proc/")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := table.Lookup(filepath.Clean("/proc")); again != v || err != nil {
		t.Errorf("asked again\nwant the same volume\ngot  another, error %v", err)
	}
	stats, err := table.Stats(t.Context(), "/proc")
	if err != nil || len(stats.Conditions) > 0 {
		t.Errorf("want stats and no condition\ngot  %v, %v", stats, err)
	}
	if err := v.Resize(t.Context(), 0, 0); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("want a FailedPrecondition\ngot  %v", err)
	}
	if _, ok := table.StatsAtOnce("/proc"); ok {
		t.Error("stats at once of what nobody watches")
	}
}

func TestKernelErrorOfAGrowthHasAKindAndARemedy(t *testing.T) {
	v := &Volume{Mountpoint: "/volume", FSType: "ext4"}
	for errno, want := range map[error]errkind.Kind{
		unix.EIO: errkind.FailedPrecondition, unix.EROFS: errkind.FailedPrecondition, unix.ESHUTDOWN: errkind.FailedPrecondition,
		unix.ENXIO: errkind.FailedPrecondition, unix.ENODEV: errkind.FailedPrecondition, fs.ErrNotExist: errkind.FailedPrecondition, unix.EUCLEAN: errkind.FailedPrecondition,
		io.EOF: errkind.FailedPrecondition, io.ErrUnexpectedEOF: errkind.FailedPrecondition, // of a read beyond the end of a disk that is leaving
		unix.EPERM: errkind.FailedPrecondition, unix.EBUSY: errkind.DeadlineExceeded, unix.EINVAL: errkind.Internal,
		context.DeadlineExceeded: errkind.DeadlineExceeded, context.Canceled: errkind.DeadlineExceeded,
	} {
		err := v.growError(fmt.Errorf("grow: %w", errno))
		if errkind.Of(err) != want || !errors.Is(err, errno) || want != errkind.Internal && !strings.Contains(err.Error(), v.Mountpoint) {
			t.Errorf("%v\nwant kind %v, and the cause kept\ngot  %v", errno, want, err)
		}
	}
}

// An I/O error during a growth may come from the new part of the disk alone: the volume goes on,
// and whoever unmounted it would interrupt its container for nothing.
func TestIOErrorOfAGrowthIsNotCalledAStop(t *testing.T) {
	v := &Volume{Mountpoint: "/volume", FSType: "xfs", Device: blockdev.Device{Path: "/dev/vda"}}
	if err := v.growError(unix.EIO); strings.Contains(err.Error(), "xfs on /dev/vda has stopped") || !strings.Contains(err.Error(), "if it still fails") {
		t.Errorf("want the remedy for both cases\ngot  %v", err)
	}
	if err := v.growError(unix.ESHUTDOWN); !strings.Contains(err.Error(), "xfs on /dev/vda has stopped") {
		t.Errorf("want it to say that xfs has stopped\ngot  %v", err)
	}
}

// While a disk hangs, every caller is answered before its deadline, and only the first caller's
// thread waits for the disk.
func TestCallOnADiskThatHangsIsAnsweredInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &Volume{Mountpoint: "/volume", growing: make(chan struct{}, 1)}
		answers, began := make(chan struct{}), 0
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := v.inTime(ctx, func(context.Context) error { began++; <-answers; return nil })
			if errkind.Of(err) != errkind.DeadlineExceeded || ctx.Err() != nil {
				t.Errorf("want a DeadlineExceeded before the deadline\ngot  %v, %v", err, ctx.Err())
			}
			cancel()
		}
		close(answers)
		synctest.Wait()
		if began != 1 {
			t.Errorf("threads that wait for the disk\nwant 1\ngot  %d", began)
		}
		if err := v.inTime(t.Context(), func(context.Context) error { return nil }); err != nil {
			t.Errorf("when it answers again: %v", err)
		}
	})
}

// A call whose caller has gone waits for its own thread's error for lastWords.
func TestThreadOfACallThatIsGivenUpHasItsLastWords(t *testing.T) {
	own := errors.New("the thread's own reason")
	for late, want := range map[time.Duration]error{lastWords - 1: own, lastWords + 1: context.Canceled} {
		synctest.Test(t, func(t *testing.T) {
			v := &Volume{Mountpoint: "/volume", growing: make(chan struct{}, 1)}
			ctx, cancel := context.WithCancel(t.Context())
			var began time.Time
			time.AfterFunc(time.Minute, func() { began = time.Now(); cancel() })
			err := v.inTime(ctx, func(ctx context.Context) error {
				<-ctx.Done()
				<-time.After(late)
				return own
			})
			if took := time.Since(began); !errors.Is(err, want) || took != min(late, lastWords) {
				t.Errorf("a thread that returns after %v\nwant %v after %v\ngot  %v after %v", late, want, min(late, lastWords), err, took)
			}
			time.Sleep(late) // until the thread has returned
		})
	}
}

// The end of a call's work ends its context, too, and 100 ms later its time: a caller that has not
// run meanwhile, on a busy guest, finds both.
func TestAnswerThatHasComeCountsHoweverLateItsCallerRuns(t *testing.T) {
	v, own := &Volume{Mountpoint: "/volume"}, errors.New("the answer")
	over, cancel := context.WithCancel(t.Context())
	cancel()
	late := make(chan struct{})
	close(late)
	for range 64 { // select would choose by chance
		answer := make(chan error, 1)
		answer <- own
		if err := v.awaitAnswer(over, answer, nil, late); err != own {
			t.Fatalf("want %v\ngot  %v", own, err)
		}
	}
	if err := v.awaitAnswer(over, nil, nil, late); errkind.Of(err) != errkind.DeadlineExceeded {
		t.Errorf("without an answer\nwant a DeadlineExceeded\ngot  %v", err)
	}
}

func TestResizeThatWaitsForAnotherGivesUpWithItsCaller(t *testing.T) {
	v := &Volume{Mountpoint: "/volume", growing: make(chan struct{}, 1)}
	if err := v.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := v.Resize(over, 0, 0); errkind.Of(err) != errkind.DeadlineExceeded {
		t.Errorf("want a DeadlineExceeded\ngot  %v", err)
	}
	v.unlock()
	if err := v.lock(t.Context()); err != nil {
		t.Errorf("the lock is not free again: %v", err)
	}
}
