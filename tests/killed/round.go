package killed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/rescue"
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

	dir     string // directory of the images
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
		fstype := []string{"ext4", "xfs"}[(n+int(r.seed))%2]
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

// powerLimit is the time limit for the power-off of a guest that only its power button reaches.
const powerLimit = 4 * time.Second

// recover returns the guest that runs after the kill. It checks that nothing of the killed part
// remains.
func (r *round) recover(ctx context.Context, g *guest, host func() (*hostProcess, error)) (*guest, error) {
	switch r.target {
	case agent:
		return g, g.simply(ctx, check)
	case vsock:
		if _, err := g.host.call(ctx, request{Call: stop, Limit: vm.Limit(powerLimit)}); err == nil {
			r.ordered = true
			break
		}
		fallthrough
	case qemu:
		if err := g.simply(ctx, end); err != nil {
			return g, err
		}
	}
	left, err := leftOnHost(ctx, g.dir, r.target == hosting)
	if err == nil && r.target == hosting && r.starts {
		left, err = r.startAndKill(ctx, g, host)
	}
	r.left = append(r.left, left...)
	if err != nil {
		return nil, err
	}
	next, err := r.start(ctx, g, host)
	if err != nil {
		return nil, err
	}
	for _, v := range r.volumes {
		if err := r.mountAgain(ctx, next, v); err != nil {
			return next, err
		}
	}
	return next, nil
}

// start starts a guest in place of one that has ended.
func (r *round) start(ctx context.Context, g *guest, host func() (*hostProcess, error)) (*guest, error) {
	h, err := host()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	next, err := startGuest(ctx, h, g.dir, g.service)
	if err == nil {
		r.took.add(start, time.Since(began))
	}
	return next, err
}

// startAndKill starts the guest again, and kills the host's process at some moment of the start. It
// returns what remains of that process.
func (r *round) startAndKill(ctx context.Context, g *guest, host func() (*hostProcess, error)) (left []string, err error) {
	h, err := host()
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = startGuest(ctx, h, g.dir, g.service) // the kill interrupts it
	}()
	moment := time.NewTimer(time.Duration(r.random.Float64() * float64(r.took.usual(start))))
	<-moment.C
	r.kills++
	running, err := vm.ProcessesWith(vmDir(g.dir))
	if err == nil {
		err = killHost(ctx, h, running)
		<-ended
	}
	if err != nil {
		return nil, err
	}
	return leftOnHost(ctx, g.dir, true)
}

func (r *round) mount(ctx context.Context, g *guest, v *volume) error {
	if _, err := g.do(ctx, request{Call: attach, Volume: v.Volume}); err != nil {
		return err
	}
	a, err := g.do(ctx, request{Call: mount, Volume: v.Volume})
	if err == nil {
		v.path = a.Text
	}
	return err
}

// mountAgain mounts a volume after a power cut, and rescues the volume first if that is necessary.
func (r *round) mountAgain(ctx context.Context, g *guest, v *volume) error {
	size, err := vm.SizeOnDisk(v.FSType, v.Path)
	if err != nil {
		return err
	}
	// An acknowledged growth is on the disk, except for a part that is no whole group.
	if size+minStep <= v.grown {
		return fmt.Errorf("%w: volume %s was grown to %d bytes, and its superblock says %d", errLost, v.ID, v.grown, size)
	}
	refused := r.mount(ctx, g, v)
	// The error has crossed two wires, so only the errno's text is left.
	if refused == nil || !strings.Contains(refused.Error(), unix.EUCLEAN.Error()) || size >= v.size && !r.grew(v) {
		return refused
	}
	if _, err := g.do(ctx, request{Call: detach, Volume: v.Volume}); err != nil {
		return err
	}
	build, err := vm.FindBuild()
	if err != nil {
		return err
	}
	kernel, image, err := build.Rescue()
	if err != nil {
		return err
	}
	if _, err := rescue.Run(ctx, rescue.Config{Disk: v.Path, Kernel: kernel, Image: image, Directvol: build.Directvol, Timeout: vm.Limit(bootLimit)}); err != nil {
		return fmt.Errorf("rescue volume %s, which was refused (%w): %w", v.ID, refused, err)
	}
	r.rescued++
	return r.mount(ctx, g, v)
}

// grew reports whether a growth of the volume was in flight. The superblock of an ext4 may already
// have the last size then, while the descriptors of the new groups are only in the journal.
func (r *round) grew(v *volume) bool {
	return slices.ContainsFunc(r.cut, func(f *flight) bool { return f.Call == resize && f.Volume.ID == v.ID })
}

// repeat makes each call that was in flight again.
func (r *round) repeat(ctx context.Context, g *guest) error {
	for _, f := range r.cut {
		if r.target == agent {
			if err := r.cutAgain(ctx, g, f); err != nil {
				return err
			}
		}
		a, err := g.do(ctx, f.request)
		if err != nil {
			return fmt.Errorf("made again, %s (which had ended with: %v): %w", f, f.err, err)
		}
		for _, v := range r.volumes {
			if v.ID != f.Volume.ID {
				continue
			}
			switch f.Call {
			case mount:
				v.path = a.Text
			case resize:
				v.grown = f.Bytes
			}
		}
	}
	return nil
}

// maxAgain is the maximum number of further kills of the agent while a call is made again.
const maxAgain = 2

// cutAgain makes a call again and kills the agent during the call, several times or never.
func (r *round) cutAgain(ctx context.Context, g *guest, f *flight) error {
	for range r.random.IntN(maxAgain + 1) {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = g.do(ctx, f.request) // the result does not matter, because the call is made again
		}()
		moment := time.NewTimer(time.Duration(r.random.Float64() * float64(r.took.usual(f.Call))))
		<-moment.C
		err := r.kill(ctx, g)
		<-ended
		if err == nil {
			err = g.simply(ctx, check)
		}
		if err != nil {
			return fmt.Errorf("killed once more while %s was made again: %w", f, err)
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
