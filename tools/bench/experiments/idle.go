package experiments

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// idleVolumes is the number of volumes that the agent watches while nobody uses them.
	idleVolumes = 16
	// idleFor is how long a run counts, and idleSettles how long the volumes are left alone before:
	// until the agent has examined them twice, and does not again for eight minutes.
	idleFor, idleSettles = time.Minute, 3 * time.Minute
	// idleSetUp is a base for vm.Limit.
	idleSetUp = time.Minute
)

var idleWakeUps = experiment{
	setUp: idleSetUp,
	name:  fmt.Sprintf("the agent beside %d healthy volumes that nobody uses", idleVolumes),
	lines: []measure.Line{
		{Name: "idle_wakeups", Unit: "a minute", Goal: measure.AtMost(10),
			What: fmt.Sprintf("the voluntary context switches of all threads of the agent (/proc/PID/task/*/status) while it watches %d healthy ext4 volumes, nobody uses them and nobody calls, between two examinations of them: each is a wait that a thread has ended", idleVolumes)},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		guest, err := vm.Boot(ctx, vm.Options{Log: l.log, Append: patient}) // without what other experiments have left
		if err != nil {
			return measure.Session{}, err
		}
		end := func(context.Context) error {
			guest.Kill()
			return guest.Close()
		}
		if _, err = l.mountMany(ctx, guest, idleVolumes); err == nil {
			err = pass(ctx, idleSettles)
		}
		if err != nil {
			return measure.Session{}, errors.Join(err, end(ctx))
		}
		return measure.Session{Close: end, Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			say("counting")
			count, err := wakeUps(ctx, guest, idleFor)
			return measure.Trial{"idle_wakeups": {count * float64(time.Minute) / float64(idleFor)}}, err
		}}, nil
	},
}

// wakeUps counts those of the agent's threads for a time, during which nobody calls the agent.
func wakeUps(ctx context.Context, guest *vm.Guest, during time.Duration) (float64, error) {
	before, err := guest.Remote.Threads(ctx, remote.Agent)
	if err != nil {
		return 0, err
	}
	if err := pass(ctx, during); err != nil {
		return 0, err
	}
	after, err := guest.Remote.Threads(ctx, remote.Agent)
	if err != nil {
		return 0, err
	}
	if after.WakeUps < before.WakeUps {
		return 0, fmt.Errorf("the agent's threads had %d switches, and have %d now: one has ended", before.WakeUps, after.WakeUps)
	}
	return float64(after.WakeUps - before.WakeUps), nil
}

// pass returns after a time, which is what is measured, or when ctx ends.
func pass(ctx context.Context, during time.Duration) error {
	over := time.NewTimer(during)
	defer over.Stop()
	select {
	case <-over.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
