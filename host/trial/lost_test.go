package trial

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/directvol/directvol/host/trial/trialtest"
)

// TestLostTrialIsNotAFailureOfTheStore: the starter is killed while a trial waits for a hanging
// store.
func TestLostTrialIsNotAFailureOfTheStore(t *testing.T) {
	s, err := current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	path, stop, answer := trialtest.Serve(t)
	defer answer()
	stop()
	var trials Trials
	waits, _ := trials.start(path, time.Hour)
	if err := trials.Read(t.Context(), os.DevNull+"/none", time.Hour); err == nil { // comes after the order that waits
		t.Error("a store that is not there answers")
	}
	s.end.Close() // the starter ends then, as if it were killed
	<-waits.ended
	if !errors.Is(waits.err, ErrUntried) {
		t.Errorf("whom its end met\nwant %v\ngot  %v", ErrUntried, waits.err)
	}
	if err := trials.Read(t.Context(), os.DevNull+"/none", time.Minute); err == nil || errors.Is(err, ErrUntried) {
		t.Errorf("the next store, which is not there\nwant its own error\ngot  %v", err)
	}
}

// Without a starter and with a hanging store open, no process can start before the store answers. A
// caller of Prepare must get an error in time.
func TestOpenHungStoreDelaysNoPrepare(t *testing.T) {
	s, err := current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	answer := openHanging(t)
	s.end.Close()
	<-s.over
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		err := Prepare(ctx)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("want %v\ngot  %v", context.DeadlineExceeded, err)
		}
	}
	answer()
	if _, err := current(t.Context()); err != nil { // the attempt that was begun
		t.Errorf("when the store answers: %v", err)
	}
}

// If a process starts only after its callers have given up, its time limit begins with its start.
// The store counts as hanging only after that.
func TestTimeOfATrialBeginsWithItsProcess(t *testing.T) {
	r := newRunning(0)
	<-r.whenLate()
	if err := r.tooLate("store"); !errors.Is(err, ErrUntried) {
		t.Errorf("a trial that has not begun\nwant %v\ngot  %v", ErrUntried, err)
	}
	r.runs(7, time.Hour)
	select {
	case <-r.whenLate():
		t.Error("it began just now, and had its time")
	default:
	}
	r.runs(7, 0)
	<-r.whenLate()
	if err := r.tooLate("store"); !errors.Is(err, ErrHangs) {
		t.Errorf("a trial that is too late\nwant %v\ngot  %v", ErrHangs, err)
	}
}
