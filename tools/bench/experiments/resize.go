package experiments

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// resizePairs is the number of pairs of filesystems that one run grows: one by the agent and
	// one by hand.
	resizePairs = 5
	// echoesBeside is the number of echoes measured together with each pair.
	echoesBeside = 20
)

// Each filesystem grows by a group. The ioctl then takes long enough to be one that users make, and
// not so long that the difference between agent and ioctl disappears in its spread.
var (
	resizeExt4 = resizing("ext4", 256<<20, 384<<20)
	// mkfs.xfs requires 300 MiB or more.
	resizeXFS = resizing("xfs", 320<<20, 400<<20)
)

// resizing returns an experiment that grows a filesystem from one size to another, both in bytes.
func resizing(fstype string, from, to uint64) experiment {
	name := "resize_" + fstype
	call, byHand := name+"_call", name+"_by_hand"
	return experiment{
		name: fmt.Sprintf("grow %s from %d to %d MiB, by the agent and by hand", fstype, from>>20, to>>20),
		lines: []measure.Line{
			echoLine,
			{Name: name, Unit: "µs", Baseline: echoLine.Name, Goal: measure.AtMost(5), What: "the extra time of ResizeVolume over the same kernel calls made by hand: the ratio counts it in echoes"},
			{Name: call, Unit: "µs", Baseline: byHand, What: "ResizeVolume of a mounted filesystem whose disk has grown already"},
			{Name: byHand, Unit: "µs", What: "the kernel's ioctl in the guest, between the same sizes, and what keeps an xfs from being lost to a power cut then: two reads of its disk before it, its label set again, one read behind that, its disk synced"},
		},
		open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
			guest, err := l.theGuest(ctx)
			if err != nil {
				return measure.Session{}, err
			}
			return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
				t := measure.Trial{}
				for pair := range resizePairs {
					say(fmt.Sprintf("pair %d of %d", pair+1, resizePairs))
					g := growth{l, guest, fstype, from, to}
					called, grown, echoes, err := g.pair(ctx, pair%2 == 1)
					if err != nil {
						return nil, err
					}
					t[call], t[byHand] = append(t[call], called), append(t[byHand], grown)
					t[name], t[echoLine.Name] = append(t[name], called-grown), append(t[echoLine.Name], echoes...)
				}
				return t, nil
			}}, nil
		},
	}
}

// growth grows new filesystems of one type, all between the same two sizes.
type growth struct {
	setup    *Setup
	guest    *vm.Guest
	fstype   string
	from, to uint64
}

// pair grows two filesystems. It returns the time of the call and the time of growing by hand, in
// microseconds, and the echoes measured with them.
func (g growth) pair(ctx context.Context, byHandFirst bool) (call, byHand float64, echoes []float64, err error) {
	e, err := dialEcho(ctx, g.guest)
	if err != nil {
		return 0, 0, nil, err
	}
	defer e.Close()
	steps := []func() error{
		func() (err error) { call, err = g.grown(ctx, e, g.byAgent); return err },
		func() (err error) { byHand, err = g.grown(ctx, e, g.byHand); return err },
	}
	if byHandFirst {
		steps[0], steps[1] = steps[1], steps[0]
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return 0, 0, nil, err
		}
		some, err := e.several(echoesBeside)
		if err != nil {
			return 0, 0, nil, err
		}
		echoes = append(echoes, some...)
	}
	return call, byHand, echoes, nil
}

// grown grows a new filesystem in one of the two ways.
func (g growth) grown(ctx context.Context, e *echo, by func(context.Context, *disk) (time.Duration, error)) (took float64, err error) {
	var options []string
	if g.fstype == "ext4" {
		options = []string{"noinit_itable"} // so that no kernel thread writes inode tables meanwhile
	}
	d, err := g.setup.newDisk(ctx, g.guest, "grown-"+g.fstype, g.fstype, g.from, options...)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.remove(ctx)) }()
	if err := os.Truncate(d.Path, int64(g.to)); err != nil {
		return 0, err
	}
	if err := d.attach(ctx); err != nil {
		return 0, err
	}
	if err := d.mount(ctx); err != nil {
		return 0, err
	}
	// After a mount the agent examines the volume by writing to it. That time must not count for
	// either way; GetVolumeStats waits for the end of the examination.
	if _, err := g.guest.Agent().GetVolumeStats(ctx, d.GuestPath); err != nil {
		return 0, err
	}
	if _, err := e.several(echoesBeside); err != nil { // which leaves the guest quiet
		return 0, err
	}
	t, err := by(ctx, d)
	return microseconds(t), err
}

func (g growth) byAgent(ctx context.Context, d *disk) (time.Duration, error) {
	defer quiet()()
	return timed(func() error { return g.guest.Agent().ResizeVolume(ctx, d.GuestPath, g.to) })
}

func (g growth) byHand(ctx context.Context, d *disk) (time.Duration, error) {
	device, err := g.guest.MountedDevice(ctx, d.GuestPath)
	if err != nil {
		return 0, err
	}
	return g.guest.Remote.Grow(ctx, remote.Grow{Path: d.GuestPath, FSType: g.fstype, Bytes: g.to, Settle: device})
}
