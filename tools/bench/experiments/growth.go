package experiments

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

// The sizes of a filesystem before and after a long growth, in bytes. The image is sparse.
const longFrom, longTo = 10 << 30, 1 << 40

var (
	growExt4  = growing("ext4")
	growXFS   = growing("xfs")
	growBtrfs = growing("btrfs")
)

// growing returns an experiment that grows a filesystem from 10 GiB to 1 TiB, in the agent's steps
// and by one ioctl, beside a writer that syncs each block.
func growing(fstype string) experiment {
	name := "grow_" + fstype + "_1tib"
	byHand, fsync, fsyncByHand := name+"_by_hand", "fsync_p99_"+name, "fsync_p99_"+name+"_by_hand"
	return experiment{
		name: fmt.Sprintf("grow %s from %d GiB to 1 TiB, in the agent's steps and in one go", fstype, longFrom>>30),
		lines: []measure.Line{
			{Name: name, Unit: "ms", Baseline: byHand, Goal: measure.AtMost(1.02), What: "ResizeVolume of a mounted filesystem on a sparse disk of 1 TiB, with a writer that syncs each 4 KiB"},
			{Name: byHand, Unit: "ms", What: "the kernel's ioctl in one go, and one freeze and thaw, beside the same writer"},
			{Name: fsync, Unit: "µs", Baseline: fsyncByHand, What: "the writer's fsyncs meanwhile, the 99th percentile of each run"},
			{Name: fsyncByHand, Unit: "µs", What: "the same beside the ioctl in one go"},
		},
		open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
			guest, err := l.theGuest(ctx)
			if err != nil {
				return measure.Session{}, err
			}
			g := longGrowth{l, guest, fstype}
			type way struct {
				took, fsync string // the rows
				grow        func(context.Context, *disk) error
			}
			ways := []way{{name, fsync, g.byAgent}, {byHand, fsyncByHand, g.byHand}}
			return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
				defer slices.Reverse(ways) // so that a drift of the machine cancels out
				t := measure.Trial{}
				for _, way := range ways {
					say(way.took)
					took, fsyncs, err := g.grown(ctx, way.grow)
					if err != nil {
						return nil, fmt.Errorf("%s: %w", way.took, err)
					}
					t[way.took] = []float64{milliseconds(took)}
					t[way.fsync] = []float64{measure.Quantile(fsyncs, 0.99)}
				}
				return t, nil
			}}, nil
		},
	}
}

// longGrowth grows new filesystems of one type from longFrom to longTo.
type longGrowth struct {
	setup  *Setup
	guest  *vm.Guest
	fstype string
}

// grown grows a new filesystem in one of the two ways, beside a writer. It returns the time of the
// growth, and those of the fsyncs that ended meanwhile, in microseconds.
func (g longGrowth) grown(ctx context.Context, grow func(context.Context, *disk) error) (took time.Duration, fsyncs []float64, err error) {
	d, err := g.setup.newDisk(ctx, g.guest, "long-"+g.fstype, g.fstype, longFrom)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, d.remove(ctx)) }()
	if err := os.Truncate(d.Path, longTo); err != nil {
		return 0, nil, err
	}
	if err := errors.Join(d.attach(ctx), d.mount(ctx)); err != nil {
		return 0, nil, err
	}
	if _, err := g.guest.Agent().GetVolumeStats(ctx, d.GuestPath); err != nil { // after the first examination
		return 0, nil, err
	}
	writer, err := g.guest.Remote.StartWriter(ctx, remote.WriteBlocks{Path: d.GuestPath + "/written", BlockBytes: pauseBlock})
	if err != nil {
		return 0, nil, err
	}
	if err := writer.Await(ctx, calmBlocks*pauseBlock); err != nil {
		return 0, nil, err
	}
	before := writer.Ledger().Blocks()
	took, err = timed(func() error { return grow(ctx, d) })
	if err != nil {
		return 0, nil, errors.Join(err, writer.Stop(ctx))
	}
	// The block that was in flight at the end counts as well.
	err = writer.Await(ctx, (writer.Ledger().Blocks()+2)*pauseBlock)
	return took, inMicroseconds(writer.Ledger().Took()[before:]), errors.Join(err, writer.Stop(ctx))
}

func (g longGrowth) byAgent(ctx context.Context, d *disk) error {
	return g.guest.Agent().ResizeVolume(ctx, d.GuestPath, longTo)
}

func (g longGrowth) byHand(ctx context.Context, d *disk) error {
	if _, err := g.guest.Remote.Grow(ctx, remote.Grow{Path: d.GuestPath, FSType: g.fstype, Bytes: longTo}); err != nil {
		return err
	}
	return g.guest.Remote.Freeze(ctx, d.GuestPath)
}
