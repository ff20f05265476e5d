// Package deadline reserves a little of a caller's time for the answer, so that the caller learns
// what the call has waited for, and measures a wait by the time in which this process could run.
package deadline

import (
	"context"
	"time"
)

// margin is the time that an answer takes to arrive, on an emulated processor too. If the deadline
// is near, a quarter of the remaining time is reserved instead.
const margin = 200 * time.Millisecond

// Early returns a context that ends a little before ctx does (see margin), so that the caller still
// gets an answer. If ctx has no deadline, neither has the result.
func Early(ctx context.Context) (context.Context, context.CancelFunc) {
	if at, ok := ctx.Deadline(); ok {
		return context.WithDeadline(ctx, at.Add(-min(margin, time.Until(at)/4)))
	}
	return context.WithCancel(ctx)
}

// awakeParts is the number of parts of the time of Awake.
const awakeParts = 8

// Awake returns a context that ends when ctx does, or after limit in which this process could run.
// A guest may stop for seconds, because its host is busy or has paused it: however long that takes,
// it counts as an eighth of the limit, and afterwards those that a caller waits for still have time
// to run. The caller calls the returned function when it no longer waits.
func Awake(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, end := context.WithCancelCause(ctx)
	parts := awakeParts
	var timer *time.Timer
	timer = time.AfterFunc(time.Hour, func() { // not yet: timer must be known
		if parts--; parts == 0 {
			end(context.DeadlineExceeded)
		} else if ctx.Err() == nil {
			timer.Reset(limit / awakeParts)
		}
	})
	timer.Reset(limit / awakeParts)
	return ctx, func() {
		timer.Stop()
		end(context.Canceled)
	}
}
