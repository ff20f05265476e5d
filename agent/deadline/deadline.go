// Package deadline keeps a little of a caller's time for the answer: a caller learns
// what the call waits for.
package deadline

import (
	"context"
	"time"
)

// margin is what an answer takes to arrive, on an emulated processor too. Of a short
// time a quarter is kept.
const margin = 200 * time.Millisecond

// Early returns a context that ends earlier than ctx does by its deadline, by as much
// as the answer needs.
func Early(ctx context.Context) (context.Context, context.CancelFunc) {
	if at, ok := ctx.Deadline(); ok {
		return context.WithDeadline(ctx, at.Add(-min(margin, time.Until(at)/4)))
	}
	return context.WithCancel(ctx)
}
