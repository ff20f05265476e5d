package killed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// target is a part that is killed.
type target string

const (
	agent   target = "agent"
	vsock   target = "vsock"
	qemu    target = "qemu"
	hosting target = "host"
)

var targets = []target{agent, vsock, qemu, hosting}

// round is one kill, with its preparation and its result.
type round struct {
	seed   uint64
	random *rand.Rand
	target target
	during call // the call during which the part is killed, if the call begins in time
	stops  bool // the guest is stopped afterwards
	starts bool // the host's process is killed once more, while it starts the guest again

	fstypes []string // of the volumes
	dir     string   // directory of the images
	took    *durations
	volumes []*volume // the last volume is the visitor: it is attached and detached again and again
	cut     []*flight
	kills   int
	rescued int
	ordered bool // a sandbox without vsock was stopped in order
	left    []string
}

// awaited are the calls during which a part is killed.
var awaited = []call{"", attach, mount, stats, resize, unmount, detach}

// maxSkip is the maximum number of awaited calls that may end before one is interrupted.
const maxSkip = 4

// newRound makes a round, and chooses from the seed what can be chosen.
func newRound(seed uint64, only target) *round {
	random := rand.New(rand.NewPCG(seed, 0))
	r := &round{seed: seed, random: random, target: targets[random.IntN(len(targets))], during: awaited[random.IntN(len(awaited))], stops: random.IntN(2) == 0, starts: random.IntN(2) == 0}
	if only != "" {
		r.target = only
	}
	return r
}

// errLost is the error of an acknowledged block or growth that is not there.
var errLost = errors.New("LOST")

// run makes the round in a running guest, and returns the guest that runs afterwards.
func (r *round) run(ctx context.Context, g *guest, host func() (*hostProcess, error)) (*guest, error) {
	if err := r.makeVolumes(ctx); err != nil {
		return g, err
	}
	if err := r.work(ctx, g); err != nil {
		return g, err
	}
	next, err := r.recover(ctx, g, host)
	if err != nil {
		return next, fmt.Errorf("after %s was killed: %w", r.target, err)
	}
	if err := r.repeat(ctx, next); err != nil {
		return next, fmt.Errorf("after %s was killed: %w", r.target, err)
	}
	for _, v := range r.volumes {
		if err := r.finish(ctx, next, v); err != nil {
			return next, fmt.Errorf("after %s was killed: %w", r.target, err)
		}
	}
	left, err := next.left(ctx)
	r.left = append(r.left, left...)
	return next, err
}

func (r *round) makeVolumes(ctx context.Context) error {
	for n := range 3 + r.random.IntN(3) { // 2 to 4, and the visitor
		fstype := r.fstypes[(n+int(r.seed))%len(r.fstypes)]
		v, err := newVolume(ctx, r.dir, fmt.Sprintf("v%d-%d", n, r.seed), fstype, r.random)
		if err != nil {
			return err
		}
		r.volumes = append(r.volumes, v)
	}
	return nil
}

// visitor is the volume that is attached and detached again and again; others are the volumes that
// grow.
func (r *round) visitor() *volume  { return r.volumes[len(r.volumes)-1] }
func (r *round) others() []*volume { return r.volumes[:len(r.volumes)-1] }

// work uses the volumes until the moment of the kill, and then kills the part.
func (r *round) work(ctx context.Context, g *guest) error {
	for _, v := range r.others() {
		if err := r.mount(ctx, g, v); err != nil {
			return err
		}
		if _, err := v.write(context.WithoutCancel(ctx), g, r.random.Uint64(), 0); err != nil {
			return err
		}
	}
	w := newWork(g, r.took, r.during, r.random.IntN(maxSkip+1))
	var workers sync.WaitGroup
	failed := make(chan error, len(r.volumes))
	begin := func(do func(context.Context, *volume, *rand.Rand) error, v *volume) {
		random := rand.New(rand.NewPCG(r.random.Uint64(), 0))
		workers.Go(func() {
			err := do(ctx, v, random)
			w.mu.Lock()
			defer w.mu.Unlock()
			if err != nil && !w.over {
				failed <- err
			}
		})
	}
	for _, v := range r.others() {
		begin(w.keepGrowing, v)
	}
	begin(w.visit, r.visitor())
	w.moment(ctx, r.random, failed)
	r.cut = w.end()
	killed := r.kill(ctx, g)
	stopped := r.endWriters(ctx)
	workers.Wait()
	close(failed)
	errs := []error{killed, stopped}
	for err := range failed {
		errs = append(errs, fmt.Errorf("before anything was killed: %w", err))
	}
	return errors.Join(errs...)
}

// kill kills the target.
func (r *round) kill(ctx context.Context, g *guest) error {
	r.kills++
	if r.target == agent {
		before, err := g.remote.Signal(ctx, remote.Agent, unix.SIGKILL)
		if err != nil {
			return err
		}
		return vm.Again(ctx, func() (bool, error) {
			now, err := g.remote.Signal(ctx, remote.Agent, 0)
			// Between the old agent and the new one there is no process, and Signal fails.
			return err == nil && !slices.Contains(now, before[0]), ctx.Err()
		})
	}
	of, err := g.processes()
	switch {
	case err != nil:
		return err
	case r.target == hosting:
		return killHost(ctx, g.host, slices.Collect(maps.Values(of)))
	case of[r.target].ID == 0:
		return errors.New("this host's kernel carries vsock, and no backend runs: KILLED_TARGET=agent, qemu or host work here")
	}
	return unix.Kill(of[r.target].ID, unix.SIGKILL)
}

// killHost kills a host's process, and waits for the end of the host's own processes.
func killHost(ctx context.Context, h *hostProcess, own []vm.Process) error {
	var ends []func(context.Context) error
	for _, p := range own {
		ended, err := vm.Ending(p.ID)
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return err
		}
		ends = append(ends, ended)
	}
	h.kill()
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(callLimit))
	defer cancel()
	var errs []error
	for _, ended := range ends {
		errs = append(errs, ended(ctx))
	}
	return errors.Join(errs...)
}

// endWriters waits until the volumes' writers have ended, and stops those that would continue.
func (r *round) endWriters(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(callLimit))
	defer cancel()
	for _, v := range r.others() {
		err := v.written[0].writer.Stop(ctx)
		if err != nil && (r.target == agent || ctx.Err() != nil) {
			return fmt.Errorf("the writer of volume %s: %w", v.ID, err)
		}
	}
	return nil
}

// finish checks everything that a volume must contain, and detaches the volume.
func (r *round) finish(ctx context.Context, g *guest, v *volume) error {
	// The volume is mounted again, so that the disk is read and not the guest's cache.
	if err := r.mount(ctx, g, v); err != nil {
		return err
	}
	if _, err := g.do(ctx, request{Call: unmount, Volume: v.Volume}); err != nil {
		return err
	}
	if err := r.mount(ctx, g, v); err != nil {
		return err
	}
	if err := v.verify(ctx, g); err != nil {
		return err
	}
	goal := vm.WholeSize(v.size)
	if _, err := g.do(ctx, request{Call: resize, Volume: v.Volume, Bytes: goal}); err != nil {
		return err
	}
	for _, c := range []call{unmount, detach} {
		if _, err := g.do(ctx, request{Call: c, Volume: v.Volume}); err != nil {
			return err
		}
	}
	if _, err := g.remote.Stat(ctx, v.path); !errors.Is(err, os.ErrNotExist) {
		r.left = append(r.left, fmt.Sprintf("the mount point %s (%v)", v.path, err))
	}
	locked, err := v.locked()
	if err != nil {
		return err
	}
	if locked {
		r.left = append(r.left, "a lock on "+v.Path)
	}
	return isWhole(ctx, v, goal)
}

// isWhole checks a volume that nobody uses.
func isWhole(ctx context.Context, v *volume, size uint64) error {
	got, err := vm.SizeOnDisk(v.FSType, v.Path)
	if err != nil {
		return err
	}
	if got != size {
		return fmt.Errorf("volume %s was grown to %d bytes, and its superblock says %d", v.ID, size, got)
	}
	run, err := vm.Check(ctx, v.FSType, v.Path)
	if err != nil {
		return err
	}
	if err := run.Err(v.FSType); err != nil {
		return fmt.Errorf("volume %s: %w", v.ID, err)
	}
	return nil
}
