package killed

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/rescue"
	"github.com/directvol/directvol/tests/vm"
)

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
