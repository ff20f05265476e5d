package main

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/logbuffer"
	"github.com/directvol/directvol/agent/rpc"
)

// busy is a server with a call that does not end.
type busy struct{}

func (busy) Shutdown(ctx context.Context) error { <-ctx.Done(); return nil }

func TestCallsInFlightHaveTenSecondsToEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if err := shutDown(busy{}, &rpc.Agent{}); err != nil || time.Since(began) != callLimit {
			t.Errorf("want them cut after %v\ngot  %v, error %v", callLimit, time.Since(began), err)
		}
	})
}

// stuck is a reader of the log that takes nothing until it is closed.
type stuck chan struct{}

func (s stuck) Write([]byte) (int, error) { <-s; return 0, io.ErrClosedPipe }

func TestReaderOfTheLogThatTakesNothingIsNotAwaitedForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := logrus.New()
		kept := &keptLog{logbuffer.New(log, nil), func() {}}
		reader := make(stuck)
		go kept.Reader().CopyTo(t.Context(), reader)
		log.Info("the last line")
		began := time.Now()
		kept.flush()
		if took := time.Since(began); took != flushLimit {
			t.Errorf("want it awaited for %v\ngot  %v", flushLimit, took)
		}
		close(reader)
	})
}

func TestUnsetTimesAreThoseOfTheTable(t *testing.T) {
	set := defaults()
	if set.hotplug != 3*time.Second || set.resizeWait != 1500*time.Millisecond {
		t.Errorf("want 3s for a disk, 1.5s for its size\ngot  %v, %v", set.hotplug, set.resizeWait)
	}
}
