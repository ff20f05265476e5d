package experiments

import (
	"context"
	"fmt"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

const (
	// idleVolumes is the number of volumes that the agent watches while nobody uses them.
	idleVolumes = 16
	// idleFor is how long a run counts. It is also how long the volumes are left alone before the
	// first run: they are mounted, and examined for the first time, before they are idle.
	idleFor = time.Minute
)

var idleWakeUps = experiment{
	name: fmt.Sprintf("the agent beside %d healthy volumes that nobody uses", idleVolumes),
	lines: []measure.Line{
		{Name: "idle_wakeups", Unit: "a minute", Goal: measure.AtMost(10),
			What: fmt.Sprintf("the voluntary context switches of all threads of the agent (/proc/PID/task/*/status) while it watches %d healthy ext4 volumes, nobody uses them and nobody calls: each is a wait that a thread has ended", idleVolumes)},
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
		if _, err := l.mountMany(ctx, guest, idleVolumes); err != nil {
			end(ctx)
			return measure.Session{}, err
		}
		settled := false
		return measure.Session{Close: end, Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			if !settled {
				say("leaving them alone")
				if err := pass(ctx, idleFor); err != nil {
					return nil, err
				}
				settled = true
			}
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
