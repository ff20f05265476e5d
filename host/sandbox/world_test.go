package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
)

// how is the way in which a call is answered.
type how int

const (
	comes     how = iota
	refused       // the call has no effect, and the answer is a refusal
	lost          // the call has no effect, and no answer comes
	lostAfter     // the call takes effect, and no answer comes
	lostLate      // no answer comes, and the call takes effect later
	spoilt        // the call takes effect, at least in part, and the answer is a refusal
)

// world is a fake machine with a fake guest and agent.
type world struct {
	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change
	done    chan struct{}

	disks  map[string]*fakeDisk  // the machine's disks, by id
	lost   map[string]*fakeDisk  // disks that have left by themselves and were not detached since
	mounts map[string]*fakeMount // by mount point
	late   map[string][]func()   // creates and removes to be carried out although their callers gave up, by container

	machineAnswers, agentAnswers how
	stuck                        bool            // the guest releases no disk
	keeps                        bool            // the guest refuses to release disks
	noService                    bool            // the agent lacks directvol's service; it carries out calls in their order
	slow                         time.Duration   // delay before the agent reads statistics
	hung, busy                   map[string]bool // by store
	storeHangs                   map[string]bool // by store, on the host

	broken []string // violated rules
}

type fakeDisk struct {
	sandbox.Disk
	slot    int
	leaving bool
	gone    chan struct{}
}

func (d *fakeDisk) source() string { return fmt.Sprintf("02/%02x", d.slot) }

type fakeMount struct {
	disk    *fakeDisk
	holders map[string]bool
}

// foreign is a container that does not belong to the sandbox.
const foreign = "foreign"

func newWorld() *world {
	return &world{
		changed: make(chan struct{}), done: make(chan struct{}), disks: map[string]*fakeDisk{}, lost: map[string]*fakeDisk{}, mounts: map[string]*fakeMount{},
		late: map[string][]func(){}, hung: map[string]bool{}, busy: map[string]bool{}, storeHangs: map[string]bool{},
	}
}

func (w *world) change(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
	w.signal()
}

func (w *world) signal() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// await waits until is returns true, and then runs do. Both run under w.mu, without a change
// between them.
func (w *world) await(ctx context.Context, is func() bool, do func() error) error {
	for {
		w.mu.Lock()
		if w.dead() {
			w.mu.Unlock()
			return sandbox.ErrEnded
		}
		if is() {
			defer w.mu.Unlock()
			defer w.signal()
			return do()
		}
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func yes() bool { return true }

func (w *world) dead() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// latency is the delay of every call and of every answer. If a caller gives up between the two, the
// call is still carried out.
const latency = 10 * time.Millisecond

func (w *world) travel(ctx context.Context) error {
	timer := time.NewTimer(latency)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *world) breaks(format string, args ...any) {
	w.broken = append(w.broken, fmt.Sprintf(format, args...))
}

// users returns the mount points of a disk. w.mu is held.
func (w *world) users(d *fakeDisk) (points []string) {
	for point, m := range w.mounts {
		if m.disk == d {
			points = append(points, point)
		}
	}
	return points
}

// leave removes a disk from the machine. w.mu is held.
func (w *world) leave(d *fakeDisk, byItself bool) {
	if points := w.users(d); len(points) > 0 && !byItself {
		w.breaks("the disk of %s left under the mounts %v", d.Path, points)
	}
	delete(w.disks, d.ID)
	if byItself {
		w.lost[d.ID] = d
	}
	close(d.gone)
	w.signal()
}

// die ends the machine.
func (w *world) die() {
	w.change(func() {
		if w.dead() {
			return
		}
		close(w.done)
		for _, d := range w.disks {
			close(d.gone)
		}
		clear(w.disks)
		clear(w.lost)
		clear(w.mounts)
		clear(w.late)
	})
}

// machine is the world as the host sees it.
type machine struct{ *world }

func (m machine) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{Serial: true, Grow: true, PowerButton: true}
}

// freeSlot returns the lowest free slot. Reusing slots at once is the worst case that a machine
// allows.
func (w *world) freeSlot() int {
	for slot := 1; ; slot++ {
		takes := func(d *fakeDisk) bool { return d.slot == slot }
		if !slices.ContainsFunc(slices.Collect(maps.Values(w.disks)), takes) && !slices.ContainsFunc(slices.Collect(maps.Values(w.lost)), takes) {
			return slot
		}
	}
}

func (m machine) Attach(ctx context.Context, disk sandbox.Disk) (place sandbox.Place, err error) {
	err = m.answer(ctx, m.machineMood, func() error {
		d := m.disks[disk.ID]
		if d == nil {
			for _, other := range m.disks {
				if other.Path == disk.Path {
					m.breaks("%s is attached twice", disk.Path)
				}
			}
			d = &fakeDisk{Disk: disk, slot: m.freeSlot(), gone: make(chan struct{})}
			m.disks[disk.ID] = d
		}
		if d.Disk != disk || d.leaving {
			m.breaks("attach of %v where %v is, leaving: %v", disk, d.Disk, d.leaving)
		}
		place = sandbox.Place{Driver: "blk", Source: d.source(), Gone: d.gone}
		return nil
	})
	return place, err
}

func (w *world) machineMood() how { return w.machineAnswers }
func (w *world) agentMood() how   { return w.agentAnswers }

var errRefused = status.Error(codes.FailedPrecondition, "no")

// answer runs do and answers, or does not, as mood says.
func (w *world) answer(ctx context.Context, mood func() how, do func() error) error {
	if err := w.travel(ctx); err != nil {
		return err
	}
	way := comes
	err := w.await(ctx, yes, func() error {
		if way = mood(); way == comes || way == lostAfter || way == spoilt {
			return do()
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case way == refused || way == spoilt:
		return errRefused
	case way != comes:
		<-ctx.Done()
		return ctx.Err()
	}
	return w.travel(ctx)
}

func (m machine) Detach(ctx context.Context, id string) error {
	var d *fakeDisk
	var kept bool
	err := m.answer(ctx, m.machineMood, func() error {
		if d = m.disks[id]; d == nil {
			delete(m.lost, id)
			return nil
		}
		d.leaving, kept = !m.keeps, m.keeps
		if !m.stuck && !kept {
			m.leave(d, false)
		}
		return nil
	})
	switch {
	case err != nil || d == nil:
		return err
	case kept:
		return sandbox.ErrKept
	}
	select {
	case <-d.gone:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m machine) Answers(ctx context.Context, id string) error {
	hangs := func() bool { return m.disks[id] != nil && m.storeHangs[m.disks[id].Path] }
	if err := m.await(ctx, func() bool { return !hangs() }, func() error { return nil }); err != nil && !m.dead() {
		return errors.Join(sandbox.ErrStoreHangs, err)
	}
	return nil
}

func (m machine) Resize(context.Context, string, uint64) error { return nil }
func (m machine) Disks() []string                              { return nil }
func (m machine) AgentAddress() string                         { return "" }
func (m machine) VsockDone() <-chan struct{}                   { return m.done }
func (m machine) VsockErr() error                              { return nil }
func (m machine) Reproduce() string                            { return "" }
func (m machine) Done() <-chan struct{}                        { return m.done }
func (m machine) PressPower(context.Context) error             { return nil }
func (m machine) Kill(context.Context) error                   { m.die(); return nil }
func (m machine) AwaitEnd(context.Context) error               { <-m.done; return nil }

// agent is the world as the guest's agent. It carries out one call at a time for each container.
// But if it can be asked about abandoned calls, other calls may overtake an abandoned one.
type agent struct{ *world }

func (a agent) Check(context.Context) error                                        { return nil }
func (a agent) CreateSandbox(context.Context, *agentpb.CreateSandboxRequest) error { return nil }
func (a agent) DestroySandbox(context.Context) error                               { return nil }
func (a agent) Close() error                                                       { return nil }
func (a agent) CheckResizeVolume(context.Context, string, uint64) error            { return nil }
func (a agent) ResizeVolume(context.Context, string, uint64) error                 { return nil }

// at returns the disk at a source. w.mu is held.
func (w *world) at(source string) *fakeDisk {
	for _, d := range w.disks {
		if d.source() == source {
			return d
		}
	}
	return nil
}

// isHung reports whether a disk's store hangs in the guest. w.mu is held.
func (w *world) isHung(d *fakeDisk) bool { return d != nil && w.hung[d.Path] }

// mount mounts a storage for a container, or refuses. w.mu is held.
func (w *world) mount(container string, s *agentpb.Storage) error {
	d := w.at(s.Source)
	if d != nil && !slices.Equal(s.DriverOptions, []string{"serial=" + d.ID}) {
		w.breaks("the agent was told to find %q where disk %s is", s.DriverOptions, d.ID)
	}
	if d == nil {
		return status.Error(codes.NotFound, "no device")
	}
	m := w.mounts[s.MountPoint]
	if m != nil && m.disk != d {
		return status.Error(codes.AlreadyExists, "something else is mounted there")
	}
	if m == nil {
		if d.leaving {
			w.breaks("%s was mounted while its disk was leaving", d.Path)
		}
		m = &fakeMount{disk: d, holders: map[string]bool{}}
		w.mounts[s.MountPoint] = m
	}
	m.holders[container] = true
	return nil
}

// lateBy is the delay of a call that continues without its caller.
const lateBy = 3 * time.Second

// outcome returns the error of an agent's client for a call that was sent and not answered.
func outcome(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return fmt.Errorf("%w: %w", err, agentclient.ErrOutcomeUnknown)
	}
	return err
}

func (a agent) CreateContainer(ctx context.Context, r *agentpb.CreateContainerRequest) error {
	s := r.Storages[0]
	return a.changes(ctx, r.ContainerId, func() bool { return !a.isHung(a.at(s.Source)) }, func() error { return a.mount(r.ContainerId, s) })
}

// changes makes a call that changes what a container holds, as soon as ready returns true.
func (a agent) changes(ctx context.Context, container string, ready func() bool, do func() error) error {
	err := a.await(ctx, ready, func() error {
		if a.noService {
			delete(a.late, container)
		}
		return nil
	})
	if err != nil {
		return outcome(err)
	}
	return outcome(a.answer(ctx, func() how {
		way := a.agentMood()
		if way == lostLate {
			a.late[container] = append(a.late[container], func() { _ = do() })
			time.AfterFunc(lateBy, a.runLate)
		}
		return way
	}, do))
}

func (w *world) runLate() {
	w.change(func() {
		for container, all := range w.late {
			delete(w.late, container)
			for _, do := range all {
				do()
			}
		}
	})
}

// held returns the mount points that a container holds. w.mu is held.
func (w *world) held(container string) (points []string) {
	for point, m := range w.mounts {
		if m.holders[container] {
			points = append(points, point)
		}
	}
	return points
}

func (a agent) RemoveContainer(ctx context.Context, id string) error {
	ready := func() bool {
		return !slices.ContainsFunc(a.held(id), func(point string) bool { return a.isHung(a.mounts[point].disk) })
	}
	return a.changes(ctx, id, ready, func() error {
		for _, point := range a.held(id) {
			m := a.mounts[point]
			if a.busy[m.disk.Path] && len(m.holders) == 1 {
				return status.Error(codes.FailedPrecondition, "in use")
			}
			if delete(m.holders, id); len(m.holders) == 0 {
				delete(a.mounts, point)
			}
		}
		return nil
	})
}

func (a agent) CheckReleased(ctx context.Context, driver, source, container string) error {
	ended := func() bool { return a.noService || len(a.late[container]) == 0 }
	if err := a.await(ctx, ended, func() error { return nil }); err != nil {
		return outcome(err)
	}
	return outcome(a.answer(ctx, a.agentMood, func() error {
		if a.noService {
			return status.Error(codes.Unimplemented, "no service")
		}
		for _, mount := range a.mounts {
			if mount.disk.source() == source {
				return status.Error(codes.FailedPrecondition, fmt.Sprintf("held by %v", mount.holders))
			}
		}
		return nil
	}))
}

func (a agent) GetVolumeStats(ctx context.Context, guestPath string) (stats *agentpb.VolumeStatsResponse, err error) {
	a.mu.Lock()
	slow := time.After(a.slow)
	a.mu.Unlock()
	select {
	case <-slow:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	err = a.await(ctx, yes, func() error {
		m := a.mounts[guestPath]
		if m == nil {
			return status.Error(codes.NotFound, "no mount point")
		}
		stats = &agentpb.VolumeStatsResponse{Usage: []*agentpb.VolumeUsage{{Total: sizeOf(m.disk.Path)}}}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return stats, a.travel(ctx)
}
