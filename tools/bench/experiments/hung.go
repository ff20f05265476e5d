package experiments

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// hungCalls is the number of calls of each kind on the hanging volume, hungAtOnce of them at a
	// time, each with a deadline.
	hungCalls, hungAtOnce = 1000, 100
	hungDeadline          = 100 * time.Millisecond
	// hungRounds is the number of calls that a run measures before the hang, and again during it.
	// With fewer calls the 99th percentile would be just the few longest, which mean nothing.
	hungRounds = 2000
	// hungSettles is the time limit for calls whose callers have given up to end in the guest.
	hungSettles = 10 * time.Second
)

// A hanging disk must not affect other volumes, and costs one thread.
var (
	besideHung = hangs("statistics beside a disk that hangs", hanging.beside, []measure.Line{
		{Name: "stats_p99_beside_hung", Unit: "µs", Baseline: "stats_p99_before_hung", Goal: measure.AtMost(1.2), What: "GetVolumeStats of a volume while another one's disk hangs and a thread waits for it, the 99th percentile of each run"},
		{Name: "stats_p99_before_hung", Unit: "µs", What: "the same before that one hangs"},
	})
	stuckThreads = hangs("the threads that wait for a disk that hangs", hanging.flooded, []measure.Line{
		{Name: "stuck_threads_per_hung_volume", Unit: "threads", Goal: measure.AtMost(1),
			What: fmt.Sprintf("the agent's threads that wait for the disk, after %d calls of each kind of its volume, %d at once", hungCalls, hungAtOnce)},
	})
)

// errNoneWaits is the failure of a run that has measured nothing: no call has reached the disk.
var errNoneWaits = errors.New("no thread of the agent's waits for the disk that hangs")

// hanging is a volume whose disk hangs, another volume, and the agent that has mounted both.
type hanging struct {
	guest  *vm.Guest
	v      *vm.Volume
	other  *disk
	client *agentclient.Client
}

// hangs makes an experiment with a volume that can hang.
func hangs(name string, run func(hanging, context.Context, func(string)) (measure.Trial, error), lines []measure.Line) experiment {
	return experiment{name: name, lines: lines, open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		guest, err := l.theGuest(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		other, err := l.mountedDisk(ctx, guest)
		if err != nil {
			return measure.Session{}, err
		}
		v, err := guest.Volume(ctx, "hung", "ext4", diskBytes)
		if err == nil {
			err = errors.Join(v.Mount(ctx), v.Serve(ctx))
		}
		if err != nil {
			return measure.Session{}, errors.Join(err, other.remove(ctx))
		}
		to, err := agentAddress(guest)
		if err != nil {
			return measure.Session{}, err
		}
		return measure.Session{
			Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
				client, err := agentclient.Dial(ctx, to, agentclient.Config{})
				if err != nil {
					return nil, err
				}
				defer client.Close()
				return run(hanging{guest, v, other, client}, ctx, say)
			},
			Close: func(ctx context.Context) error {
				return errors.Join(v.Heal(ctx), v.Detach(ctx), other.remove(ctx))
			},
		}, nil
	}}
}

// beside measures the other volume's statistics before and while the disk hangs.
func (h hanging) beside(ctx context.Context, say func(string)) (t measure.Trial, err error) {
	t = measure.Trial{}
	stats := func(row string) error {
		say(row)
		took, err := inTurn([]func() error{func() error { _, err := h.client.GetVolumeStats(ctx, h.other.GuestPath); return err }}, hungRounds, func(int) {})
		if err == nil {
			t[row] = []float64{measure.Quantile(took[0], 0.99)}
		}
		return err
	}
	if err := stats("stats_p99_before_hung"); err != nil {
		return nil, err
	}
	return t, h.whileItHangs(ctx, 1, say, func() error {
		if err := h.isHung(ctx); err != nil {
			return err
		}
		return stats("stats_p99_beside_hung")
	})
}

// isHung returns when the agent says that the volume's disk does not answer, and one of its threads
// waits: before that nothing is beside it. Requests may wait where the kernel does not count them
// as in flight: then the agent says IOSlow, 5 s after it has asked.
func (h hanging) isHung(ctx context.Context) error {
	_, err := h.v.AwaitHealth(ctx, func(conditions []*volumepb.Condition) bool {
		return slices.ContainsFunc(conditions, func(c *volumepb.Condition) bool { return c.Reason == "IOHung" || c.Reason == "IOSlow" })
	})
	if err != nil {
		return err
	}
	threads, err := h.guest.Remote.Threads(ctx, remote.Agent)
	if err == nil && threads.Waiting() == 0 {
		err = errNoneWaits
	}
	return err
}

// flooded counts the threads that wait for the disk after many calls.
func (h hanging) flooded(ctx context.Context, say func(string)) (t measure.Trial, err error) {
	err = h.whileItHangs(ctx, hungCalls, say, func() error {
		waiting, err := h.settled(ctx)
		if err == nil && waiting == 0 {
			err = errNoneWaits
		}
		t = measure.Trial{"stuck_threads_per_hung_volume": {float64(waiting)}}
		return err
	})
	return t, err
}

// whileItHangs makes the disk hang with data to write, makes a number of calls of each kind on its
// volume, and then runs do. When it returns, the volume is healthy again.
func (h hanging) whileItHangs(ctx context.Context, calls int, say func(string), do func() error) (err error) {
	if err := h.guest.Remote.WriteFile(ctx, h.v.GuestPath+"/dirty", make([]byte, 64<<10)); err != nil {
		return err
	}
	if err := h.v.Hang(ctx); err != nil {
		return err
	}
	defer func() {
		healed := h.v.Answer()
		if healed == nil {
			_, healed = h.v.AwaitCondition(ctx, vm.Healthy)
		}
		err = errors.Join(err, healed)
	}()
	err = h.v.Flooded(ctx, calls, min(calls, hungAtOnce), hungDeadline, func(kind string, failed int) error {
		say(fmt.Sprintf("%d calls of %s, %d failed", calls, kind, failed))
		return nil
	})
	if err != nil {
		return err
	}
	return do()
}

// settled returns the number of waiting threads, once at most one thread waits or hungSettles has
// passed.
func (h hanging) settled(ctx context.Context) (waiting int, err error) {
	limit := time.NewTimer(hungSettles)
	defer limit.Stop()
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		threads, err := h.guest.Remote.Threads(ctx, remote.Agent)
		if err != nil || threads.Waiting() <= 1 {
			return threads.Waiting(), err
		}
		select {
		case <-again.C:
		case <-limit.C:
			return threads.Waiting(), nil
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}
