package trial

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// The start of the process that starts the trials hangs. Prepare and a trial give up in time.
func TestStartOfATrialIsAwaitedForALimitedTime(t *testing.T) {
	startersMu.Lock()
	before, attempted := latest, next
	startersMu.Unlock()
	defer func() {
		startersMu.Lock()
		defer startersMu.Unlock()
		latest, next = before, attempted
	}()
	synctest.Test(t, func(t *testing.T) {
		hangs := &attempt{ended: make(chan struct{}), err: errors.New("it has ended at last")}
		startersMu.Lock()
		latest, next = nil, hangs
		startersMu.Unlock()
		began := time.Now()
		if err := Prepare(t.Context()); err == nil || time.Since(began) != startLimit {
			t.Errorf("Prepare\nwant it to fail after %v\ngot  %v, error %v", startLimit, time.Since(began), err)
		}
		began = time.Now()
		var trials Trials
		if err := trials.Read(t.Context(), "store", time.Hour); !errors.Is(err, ErrUntried) || time.Since(began) != startLimit {
			t.Errorf("a trial\nwant %v after %v\ngot  %v after %v", ErrUntried, startLimit, err, time.Since(began))
		}
		close(hangs.ended)
	})
}
