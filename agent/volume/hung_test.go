package volume

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// Flush gives up early on a disk that hangs, but not on a slow one.
func TestFlushWaitsForADiskThatHangsForAWhileOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		hangsUntil := began.Add(hungLimit - 2*time.Second)
		after, cancel := whileAnswering(t.Context(), func() bool {
			return time.Now().Before(hangsUntil) || time.Since(began) > time.Minute
		})
		defer cancel()
		<-after.Done()
		if took := time.Since(began); took < time.Minute+hungLimit || took > time.Minute+hungLimit+2*time.Second || !errors.Is(context.Cause(after), errHangs) {
			t.Errorf("it ended after %v: %v", took, context.Cause(after))
		}
		early, cancelEarly := whileAnswering(t.Context(), func() bool { return true })
		cancelEarly()
		if err := context.Cause(early); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	})
}
