package experiments

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// pauseGrowths is the number of growths in one run, in each of the two ways.
	pauseGrowths = 6
	// pauseStep is the growth of each in bytes: more than an allocation group of the xfs or a block
	// group of the ext4.
	pauseStep = 160 << 20
	// calmBlocks is the number of blocks written between two growths, which give the time of an
	// fsync without a growth.
	calmBlocks = 70
	// askAgain is the pause between two attempts to grow while the guest does not see the new size
	// yet.
	askAgain = 20 * time.Millisecond
	// pauseBlock is the size of the writer's block, in bytes.
	pauseBlock = 4096
)

var (
	pauseExt4 = pausing("ext4", 256<<20)
	pauseXFS  = pausing("xfs", 320<<20)
)

// pausing returns an experiment that grows a filesystem again and again under a writer that syncs
// each block, and measures the writer's longest wait.
func pausing(fstype string, from uint64) experiment {
	name := "grow_pause_" + fstype
	bare, calm := name+"_ioctl", "fsync_p99_"+fstype
	return experiment{
		name: "the longest fsync of a writer while its " + fstype + " grows",
		lines: []measure.Line{
			{Name: name, Unit: "µs", Baseline: calm, Goal: measure.AtMost(10), What: "the longest fsync of a run around its growths by the agent: the ratio is this in p99s without one"},
			{Name: bare, Unit: "µs", Baseline: calm, What: "the same around the bare ioctl, which leaves a growth that a power cut may lose"},
			{Name: calm, Unit: "µs", What: "the 99th percentile of an fsync between growths"},
		},
		open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
			guest, err := l.theGuest(ctx)
			if err != nil {
				return measure.Session{}, err
			}
			return measure.Session{Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
				p := pauses{setup: l, guest: guest, fstype: fstype, size: from, calm: calm}
				t := measure.Trial{}
				for way, grow := range map[string]func(context.Context) error{name: p.byAgent, bare: p.byIoctl} {
					p.size = from
					if err := p.measure(ctx, t, way, grow, say); err != nil {
						return nil, err
					}
				}
				return t, nil
			}}, nil
		},
	}
}

// pauses grows one disk after another, each from the same size.
type pauses struct {
	setup  *Setup
	guest  *vm.Guest
	fstype string
	size   uint64 // of the disk, in bytes
	calm   string // the row of the fsync time without a growth
	disk   *disk
}

// measure adds the longest fsync around all growths to a row, and the p99 of the fsyncs without a
// growth to the row's baseline.
func (p *pauses) measure(ctx context.Context, t measure.Trial, row string, grow func(context.Context) error, say func(string)) (err error) {
	if p.disk, err = p.setup.newDisk(ctx, p.guest, "paused-"+p.fstype, p.fstype, p.size); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.disk.remove(ctx)) }()
	if err := errors.Join(p.disk.attach(ctx), p.disk.mount(ctx)); err != nil {
		return err
	}
	writer, err := p.guest.Remote.StartWriter(ctx, remote.WriteBlocks{Path: p.disk.GuestPath + "/written", BlockBytes: pauseBlock})
	if err != nil {
		return err
	}
	var calm, around []float64
	for i := range pauseGrowths {
		say(fmt.Sprintf("%s, growth %d of %d", row, i+1, pauseGrowths))
		before := writer.Ledger().Blocks()
		if err := writer.Await(ctx, (before+calmBlocks)*pauseBlock); err != nil {
			return err
		}
		began := writer.Ledger().Blocks()
		if err := grow(ctx); err != nil {
			return err
		}
		// The block that was in flight when the answer came counts as well.
		if err := writer.Await(ctx, (writer.Ledger().Blocks()+2)*pauseBlock); err != nil {
			return err
		}
		took := writer.Ledger().Took()
		calm = append(calm, inMicroseconds(took[before:began])...)
		around = append(around, inMicroseconds(took[began:])...)
	}
	t[row] = append(t[row], measure.Quantile(around, 1))
	t[p.calm] = append(t[p.calm], measure.Quantile(calm, 0.99))
	return writer.Stop(ctx)
}

func inMicroseconds(all []time.Duration) []float64 {
	out := make([]float64, len(all))
	for i, d := range all {
		out[i] = microseconds(d)
	}
	return out
}

// byAgent grows disk and filesystem as a user does.
func (p *pauses) byAgent(ctx context.Context) error {
	p.size += pauseStep
	return p.guest.Resize(ctx, p.disk.ID, p.size)
}

// byIoctl grows the disk the same way, and grows the filesystem without the agent.
func (p *pauses) byIoctl(ctx context.Context) error {
	p.size += pauseStep
	if err := p.guest.VM().ResizeDisk(ctx, p.disk.DiskID(), p.size); err != nil {
		return err
	}
	// The guest's kernel notices the new size by itself, so ask it again until it has.
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		_, err := p.guest.Remote.Grow(ctx, remote.Grow{Path: p.disk.GuestPath, FSType: p.fstype, Bytes: p.size})
		if err == nil || ctx.Err() != nil || !isBeyondDevice(err) {
			return err
		}
		<-again.C
	}
}

// isBeyondDevice reports whether an ioctl failed because the device has not grown yet: xfs and ext4
// return different errnos.
func isBeyondDevice(err error) bool { return errors.Is(err, unix.EIO) || errors.Is(err, unix.ENOSPC) }
