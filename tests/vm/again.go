package vm

import (
	"context"
	"time"
)

// askAgain is the pause between two questions to a kernel about a change that it does not announce.
const askAgain = 10 * time.Millisecond

// Again calls ask until it returns true or an error, or until ctx ends.
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
