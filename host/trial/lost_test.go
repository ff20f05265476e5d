package trial

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/directvol/directvol/host/trial/trialtest"
)

// TestStoreWhoseTrialIsLostIsNotSaidToFail: the process that starts the trials is killed while one waits for a store that hangs.
func TestStoreWhoseTrialIsLostIsNotSaidToFail(t *testing.T) {
	s, err := current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	path, stop, answer := trialtest.Serve(t)
	defer answer()
	stop()
	var trials Trials
	waits, _ := trials.start(path, time.Hour)
	if err := trials.Read(t.Context(), os.DevNull+"/none", time.Hour); err == nil { // behind the one that waits
		t.Error("a store that is not there answers")
	}
	s.end.Close() // it ends then, as when it is killed
	<-waits.ended
	if !errors.Is(waits.err, ErrUntried) {
		t.Errorf("whom its end met\nwant %v\ngot  %v", ErrUntried, waits.err)
	}
	if err := trials.Read(t.Context(), os.DevNull+"/none", time.Minute); err == nil || errors.Is(err, ErrUntried) {
		t.Errorf("the next store, which is not there\nwant its own error\ngot  %v", err)
	}
}

// With its starter gone and a store open that hangs, no process begins before the store answers: whoever wants one is told in time.
func TestStoreThatHangsAndIsOpenHoldsUpNobodyWhoPrepares(t *testing.T) {
	s, err := current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	path, stop, answer := trialtest.Serve(t)
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	defer answer() // first
	stop()
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
	if _, err := current(t.Context()); err != nil { // what was begun
		t.Errorf("when the store answers: %v", err)
	}
}

// A process that begins when nobody waits for it any more has its time all the same: only then the store hangs.
func TestTrialThatBeginsLateHasItsTimeFromThen(t *testing.T) {
	r := newRunning(0)
	<-r.whenLate()
	if err := r.tooLate("store"); !errors.Is(err, ErrUntried) {
		t.Errorf("of one that has not begun\nwant %v\ngot  %v", ErrUntried, err)
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
		t.Errorf("of one that had its time\nwant %v\ngot  %v", ErrHangs, err)
	}
}
