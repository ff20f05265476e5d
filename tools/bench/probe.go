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
		{name: "probe_cost", unit: "µs", baseline: "fsync_p99_unwatched", goal: atMost(1.05), what: "the 99th percentile of an fsync on an ext4 that the agent watches"},
		{name: "fsync_p99_unwatched", unit: "µs", what: "the same on the same device, mounted by hand"},
	},
	open: func(ctx context.Context, l *lab, _ int) (session, error) {
		w, err := l.openTwoWays(ctx, "probed", probeDisk, func(context.Context, string) error { return nil })
		if err != nil {
			return session{}, err
		}
		type way struct {
			row     string
			mounted func(context.Context, func(string) error) error
		}
		ways := []way{{"probe_cost", w.byAgent}, {"fsync_p99_unwatched", w.byHand}}
		return session{close: w.close, run: func(ctx context.Context, say func(string)) (trial, error) {
			samples := trial{}
			for pass := range 4 { // there and back: what drifts evens out
				way := ways[min(pass, 3-pass)%2]
				say(fmt.Sprintf("pass %d of 4", pass+1))
				err := way.mounted(ctx, func(path string) error {
					took, err := w.fsyncs(ctx, path)
					samples[way.row] = append(samples[way.row], took...)
					return err
				})
				if err != nil {
					return nil, err
				}
			}
			slices.Reverse(ways)
			return trial{"probe_cost": {quantile(samples["probe_cost"], 0.99)}, "fsync_p99_unwatched": {quantile(samples["fsync_p99_unwatched"], 0.99)}}, nil
		}}, nil
	},
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
