package vm

import (
	"context"
	"time"
)

// askAgain is how often a kernel is asked for what it tells no test.
const askAgain = 10 * time.Millisecond

// Again asks until it is so, or asking fails, or ctx ends.
func Again(ctx context.Context, ask func() (bool, error)) error {
	ticks := time.NewTicker(askAgain)
	defer ticks.Stop()
	for {
		if done, err := ask(); done || err != nil {
			return err
		}
		select {
		case <-ticks.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
