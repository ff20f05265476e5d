package turns

import (
	"context"
	"errors"
	"sync"
	"testing"
)

func TestTurnsAreOneAtATimeAndLeaveNoEntries(t *testing.T) {
	var turns Turns
	var wait sync.WaitGroup
	count := 0
	for range 100 {
		wait.Go(func() {
			done, err := turns.Take(t.Context(), "a")
			if err != nil {
				t.Error(err)
				return
			}
			defer done()
			count++
		})
	}
	wait.Wait()
	done, err := turns.Take(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	given, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := turns.Take(given, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("a turn was taken though its context had ended: %v", err)
	}
	done()
	if count != 100 || len(turns.queues) != 0 {
		t.Errorf("%d turns taken, %d queues left", count, len(turns.queues))
	}
}
