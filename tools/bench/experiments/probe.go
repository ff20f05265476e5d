package experiments

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// probedFor is how long the writer syncs in each way: longer than the six seconds during which
	// the agent does not probe a volume that is written to.
	probedFor = 7 * time.Second
	// probedBytes is the maximum that the writer writes meanwhile, and probeDisk the volume's size,
	// both in bytes.
	probedBytes, probeDisk = 384 << 20, 512 << 20
)

// The agent writes to a volume to check that it accepts writes. A writer that syncs each block
// would suffer most from that. The disk's image lies in the host's memory, so that the host's own
// disk adds no spread.
var probeCost = experiment{
	inMemory: true,
	name:     "an fsync writer on a volume that the agent watches, and on the same volume without a watch",
	lines: []measure.Line{
		{Name: "probe_cost", Unit: "µs", Baseline: "fsync_mean_unwatched", Goal: measure.AtMost(1.05), What: fmt.Sprintf("the fsyncs of %v on an ext4 that the agent watches: their time together, divided by their number", probedFor)},
		{Name: "fsync_mean_unwatched", Unit: "µs", What: "the same on the same device, mounted by hand"},
		{Name: "fsync_worst_watched", Unit: "µs", Baseline: "fsync_worst_unwatched", What: "the longest of the fsyncs of probe_cost"},
		{Name: "fsync_worst_unwatched", Unit: "µs", What: "the longest of those of fsync_mean_unwatched"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		w, err := l.openTwoWays(ctx, l.memory, "probed", probeDisk, func(context.Context, string) error { return nil })
		if err != nil {
			return measure.Session{}, err
		}
		type way struct {
			mean, worst string // names of rows
			mounted     func(context.Context, func(string) error) error
		}
		ways := []way{{"probe_cost", "fsync_worst_watched", w.byAgent}, {"fsync_mean_unwatched", "fsync_worst_unwatched", w.byHand}}
		return measure.Session{Close: w.close, Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			t := measure.Trial{}
			for _, way := range ways {
				say(way.mean)
				err := way.mounted(ctx, func(path string) error {
					took, err := w.fsyncs(ctx, path)
					if err == nil {
						t[way.mean], t[way.worst] = []float64{mean(took)}, []float64{slices.Max(took)}
					}
					return err
				})
				if err != nil {
					return nil, err
				}
			}
			slices.Reverse(ways) // swap the order for the next run, so that a drift of the machine cancels out
			return t, nil
		}}, nil
	},
}

// mean returns the mean. It includes the cost of a probe, which delays few fsyncs but those for
// long; a quantile would hide them.
func mean(samples []float64) float64 {
	sum := 0.0
	for _, s := range samples {
		sum += s
	}
	return sum / float64(len(samples))
}

// fsyncs returns the time of each block of a writer, in microseconds.
func (w *twoWays) fsyncs(ctx context.Context, path string) ([]float64, error) {
	writer, err := w.guest.Remote.StartWriter(ctx, remote.WriteBlocks{Path: path + "/written", BlockBytes: pauseBlock, LimitBytes: probedBytes})
	if err != nil {
		return nil, err
	}
	enough := time.NewTimer(probedFor)
	defer enough.Stop()
	select {
	case <-enough.C:
	case <-writer.Done(): // the agent may not have probed yet
		return nil, errors.Join(writer.Stop(ctx), fmt.Errorf("the writer has ended within %v, at its limit of %d bytes: raise probedBytes", probedFor, probedBytes))
	case <-ctx.Done():
	}
	if err := writer.Stop(ctx); err != nil {
		return nil, err
	}
	took := inMicroseconds(writer.Ledger().Took())
	if len(took) == 0 {
		return nil, fmt.Errorf("no fsync in %v", probedFor)
	}
	return took, nil
}
