package deadline

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// The answer has 200 ms to arrive, or a quarter of the time if that is less.
func TestTimeForTheAnswerIsReserved(t *testing.T) {
	for limit, want := range map[time.Duration]time.Duration{
		time.Minute: time.Minute - margin, 4 * margin: 3 * margin, 400 * time.Millisecond: 300 * time.Millisecond, 0: 0,
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			early, end := Early(ctx)
			defer end()
			if <-early.Done(); time.Since(began) != want {
				t.Errorf("of %v\nwant it to end after %v\ngot  %v", limit, want, time.Since(began))
			}
		})
	}
	if early, end := Early(t.Context()); early.Err() != nil {
		t.Error("a call without a deadline has ended")
	} else if _, limited := early.Deadline(); limited {
		t.Error("a call without a deadline has got one")
	} else {
		end()
	}
}
