package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/directvol/directvol/tests/guest/act"
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
	lines: []line{
		{name: "probe_cost", unit: "µs", baseline: "fsync_mean_unwatched", goal: atMost(1.05), what: "1600 fsyncs on an ext4 that the agent watches: their time together, divided by their number"},
		{name: "fsync_mean_unwatched", unit: "µs", what: "the same on the same device, mounted by hand"},
		{name: "fsync_worst_watched", unit: "µs", baseline: "fsync_worst_unwatched", what: "the longest of the fsyncs of probe_cost"},
		{name: "fsync_worst_unwatched", unit: "µs", what: "the longest of those of fsync_mean_unwatched"},
	},
	open: func(ctx context.Context, l *lab, _ int) (session, error) {
		w, err := l.openTwoWays(ctx, "probed", probeDisk, func(context.Context, string) error { return nil })
		if err != nil {
			return session{}, err
		}
		type way struct {
			mean, worst string // rows
			mounted     func(context.Context, func(string) error) error
		}
		ways := []way{{"probe_cost", "fsync_worst_watched", w.byAgent}, {"fsync_mean_unwatched", "fsync_worst_unwatched", w.byHand}}
		return session{close: w.close, run: func(ctx context.Context, say func(string)) (trial, error) {
			samples := trial{}    // by the row of their mean
			for pass := range 4 { // there and back: what drifts evens out
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
			result := trial{}
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
