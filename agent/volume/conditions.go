package volume

import (
	"context"
	"sync"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
)

// Conditions returns the conditions of the volumes mounted at paths, in the order of paths; none
// for a volume that cannot be measured. It measures all at the same time. A volume whose disk hangs
// takes as long as Stats does, and counts as slow.
func (t *Table) Conditions(ctx context.Context, paths []string) [][]health.Condition {
	found := make([][]health.Condition, len(paths))
	var all sync.WaitGroup
	for i, path := range paths {
		all.Go(func() {
			stats, err := t.Stats(ctx, path)
			found[i] = stats.Conditions
			if errkind.Of(err) == errkind.DeadlineExceeded { // no answer yet
				found[i] = health.Unanswered(nil, "filesystem", path, time.Time{})
			}
		})
	}
	all.Wait()
	return found
}
