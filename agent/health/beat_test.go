package health

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

// beating is a monitor with one watch and a disk whose counts a test sets.
type beating struct {
	*Monitor
	watch                  *Watch
	reads, ended, inFlight atomic.Int64
}

func newBeating(t *testing.T, followed bool) *beating {
	b := &beating{Monitor: quiet()}
	b.watch = &Watch{monitor: b.Monitor, target: Target{Device: blockdev.Device{Number: unix.Mkdev(254, 1)}}, poked: make(chan struct{}, 1), doubted: make(chan struct{}, 1), looked: make(chan struct{})}
	b.add(b.watch)
	b.pulse.followed.Store(followed)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = b.beats(ctx, func() ([]byte, error) {
			b.reads.Add(1)
			return fmt.Appendf(nil, "254 1 vda1 %d 0 40 9 0 0 56 9 %d 9 18\n", b.ended.Load(), b.inFlight.Load()), nil
		})
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return b
}

// in returns how often the counts are read in a time.
func (b *beating) in(d time.Duration) int64 {
	before := b.reads.Load()
	time.Sleep(d)
	synctest.Wait()
	return b.reads.Load() - before
}

func TestBeatRestsWhileNoDeviceHasAnythingToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBeating(t, true)
		check := func(when string, during time.Duration, least, most int64) {
			t.Helper()
			if got := b.in(during); got < least || got > most {
				t.Errorf("%s: reads in %v\nwant %d to %d\ngot  %d", when, during, least, most, got)
			}
		}
		b.ended.Store(7)
		check("at first", 5*time.Second, 4, 5)
		check("nothing happens", 5*time.Minute, 5, 8)
		b.ended.Add(restRequests)
		check("an examination", 5*time.Minute, 5, 5)
		b.ended.Add(restRequests + 1)
		check("work, seen at the next look", restInterval+restAfter*time.Second, restAfter+1, restAfter+1)
		for name, begin := range map[string]func(){
			"a program waits":      b.pulse.stir,
			"another volume comes": func() { b.add(b.watch) },
		} {
			check("at rest before "+name, 5*time.Minute, 5, 5)
			begin()
			check(name, restAfter*time.Second, restAfter, restAfter)
		}
		b.pulse.stir()
		b.inFlight.Store(1)
		check("a request is in flight", 100*time.Second, 99, 100)
		b.inFlight.Store(0)
		b.watch.paused.Store(true)
		check("a call has paused the watch", 100*time.Second, 99, 100)
	})
}

// Without news from the kernel of programs that wait, a hang could go unnoticed during a rest.
func TestBeatDoesNotRestIfTheKernelDoesNotSayWhoWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if got := newBeating(t, false).in(100 * time.Second); got < 99 {
			t.Errorf("reads in 100 s\nwant 99 or 100\ngot  %d", got)
		}
	})
}
