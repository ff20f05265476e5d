package experiments

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// hungCalls are made of each kind on the volume that hangs, so many at once, with a deadline each.
	hungCalls, hungAtOnce = 1000, 25
	hungDeadline          = 100 * time.Millisecond
	// hungRounds are what a run measures before and beside: of fewer the 99th percentile is the longest few, which say nothing.
	hungRounds = 2000
	// hungSettles is how long those calls have to end in the guest whose callers have given up.
	hungSettles = 10 * time.Second
)

// One disk that hangs is nobody else's trouble, and costs one thread.
var besideHung = experiment{
	name: "statistics beside a disk that hangs, and the threads that wait for it",
	lines: []measure.Line{
		{Name: "stats_p99_beside_hung", Unit: "µs", Baseline: "stats_p99_before_hung", Goal: measure.AtMost(1.2), What: "GetVolumeStats of a volume while another one's disk hangs, the 99th percentile of each run"},
		{Name: "stats_p99_before_hung", Unit: "µs", What: "the same before that one hangs"},
		{Name: "stuck_threads_per_hung_volume", Unit: "threads", Goal: measure.AtMost(1),
			What: fmt.Sprintf("the agent's threads that wait for the disk, after %d calls of each kind of its volume", hungCalls)},
	},
	open: func(ctx context.Context, l *Lab, _ int) (measure.Session, error) {
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
		h := hanging{guest: guest, v: v, other: other}
		return measure.Session{
			Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
				client, err := agentclient.Dial(ctx, to, agentclient.Config{})
				if err != nil {
					return nil, err
				}
				defer client.Close()
				return h.run(ctx, client, say)
			},
			Close: func(ctx context.Context) error {
				return errors.Join(v.Heal(ctx), v.Detach(ctx), other.remove(ctx))
			},
		}, nil
	},
}

// hanging is a volume whose disk hangs, and another.
type hanging struct {
	guest *vm.Guest
	v     *vm.Volume
	other *disk
}

func (h hanging) run(ctx context.Context, client *agentclient.Client, say func(string)) (_ measure.Trial, err error) {
	stats := func() error { _, err := client.GetVolumeStats(ctx, h.other.GuestPath); return err }
	say("statistics before")
	before, err := inTurn([]func() error{stats}, hungRounds, func(int) {})
	if err != nil {
		return nil, err
	}
	if err := h.guest.Act.WriteFile(ctx, h.v.GuestPath+"/dirty", make([]byte, 64<<10)); err != nil {
		return nil, err
	}
	if err := h.v.Hang(ctx); err != nil {
		return nil, err
	}
	defer func() {
		healed := h.v.Answer()
		if healed == nil {
			_, healed = h.v.AwaitCondition(ctx, vm.Healthy)
		}
		err = errors.Join(err, healed)
	}()
	err = h.v.Flooded(ctx, hungCalls, hungAtOnce, hungDeadline, func(kind string, failed int) error {
		say(fmt.Sprintf("%d calls of %s, %d failed", hungCalls, kind, failed))
		return nil
	})
	if err != nil {
		return nil, err
	}
	waiting, err := h.settled(ctx)
	if err != nil {
		return nil, err
	}
	say("statistics beside it")
	beside, err := inTurn([]func() error{stats}, hungRounds, func(int) {})
	if err != nil {
		return nil, err
	}
	return measure.Trial{
		"stats_p99_before_hung": {measure.Quantile(before[0], 0.99)}, "stats_p99_beside_hung": {measure.Quantile(beside[0], 0.99)},
		"stuck_threads_per_hung_volume": {float64(waiting)},
	}, nil
}

// settled returns how many threads wait, when no more than one does, or none of those that do will end.
func (h hanging) settled(ctx context.Context) (waiting int, err error) {
	limit := time.NewTimer(hungSettles)
	defer limit.Stop()
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		threads, err := h.guest.Act.Threads(ctx, act.Agent)
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
