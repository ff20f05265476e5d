package experiments

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// probedBlocks are what the writer syncs in each way, one after the other: it takes some seconds, in which the agent looks more than once.
	probedBlocks = 800
	// probeDisk is the volume's size in bytes.
	probeDisk = 128 << 20
)

// The agent looks whether a volume takes writes by writing to it. A writer that syncs each block is whom that would cost most.
var probeCost = experiment{
	name: "an fsync writer on a volume that the agent watches, and on the same one that nobody watches",
	lines: []measure.Line{
		{Name: "probe_cost", Unit: "µs", Baseline: "fsync_mean_unwatched", Goal: measure.AtMost(1.05), What: "1600 fsyncs on an ext4 that the agent watches: their time together, divided by their number"},
		{Name: "fsync_mean_unwatched", Unit: "µs", What: "the same on the same device, mounted by hand"},
		{Name: "fsync_worst_watched", Unit: "µs", Baseline: "fsync_worst_unwatched", What: "the longest of the fsyncs of probe_cost"},
		{Name: "fsync_worst_unwatched", Unit: "µs", What: "the longest of those of fsync_mean_unwatched"},
	},
	open: func(ctx context.Context, l *Lab, _ int) (measure.Session, error) {
		w, err := l.openTwoWays(ctx, "probed", probeDisk, func(context.Context, string) error { return nil })
		if err != nil {
			return measure.Session{}, err
		}
		type way struct {
			mean, worst string // rows
			mounted     func(context.Context, func(string) error) error
		}
		ways := []way{{"probe_cost", "fsync_worst_watched", w.byAgent}, {"fsync_mean_unwatched", "fsync_worst_unwatched", w.byHand}}
		return measure.Session{Close: w.close, Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			samples := measure.Trial{} // by the row of their mean
			for pass := range 4 {      // there and back: what drifts evens out
				way := ways[min(pass, 3-pass)%2]
				say(fmt.Sprintf("pass %d of 4", pass+1))
				err := way.mounted(ctx, func(path string) error {
					took, err := w.fsyncs(ctx, path)
					samples[way.mean] = append(samples[way.mean], took...)
					return err
				})
				if err != nil {
					return nil, err
				}
			}
			slices.Reverse(ways)
			result := measure.Trial{}
			for _, way := range ways {
				result[way.mean], result[way.worst] = []float64{mean(samples[way.mean])}, []float64{slices.Max(samples[way.mean])}
			}
			return result, nil
		}}, nil
	},
}

// mean shows what a probe costs that few fsyncs meet, and these for long; a quantile would leave them out.
func mean(samples []float64) float64 {
	sum := 0.0
	for _, s := range samples {
		sum += s
	}
	return sum / float64(len(samples))
}

// fsyncs returns how long each block of a writer took, in microseconds.
func (w *twoWays) fsyncs(ctx context.Context, path string) ([]float64, error) {
	writer, err := w.guest.Act.StartWriter(ctx, act.WriteBlocks{Path: path + "/written", BlockBytes: pauseBlock, LimitBytes: probedBlocks * pauseBlock})
	if err != nil {
		return nil, err
	}
	err = errors.Join(writer.Await(ctx, probedBlocks*pauseBlock), writer.Err())
	return inMicroseconds(writer.Ledger().Took()), err
}
