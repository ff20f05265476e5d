package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/guestpath"
)

// Volume is a volume for a sandbox.
type Volume struct {
	// ID is the caller's name of it: any 1 to 128 bytes.
	ID string
	// Path is its store on the host: an image file or a block device that
	// holds a filesystem and nothing else.
	Path string
	// FSType is ext4 or xfs, and Options are its mount options.
	FSType   string
	Options  []string
	ReadOnly bool
}

func (v Volume) is(other Volume) bool {
	return v.Path == other.Path && v.FSType == other.FSType && v.ReadOnly == other.ReadOnly && slices.Equal(v.Options, other.Options)
}

// Attach gives the machine a volume's disk. The guest does not use it yet. Repeated
// with the same volume it changes nothing.
func (s *Sandbox) Attach(ctx context.Context, want Volume) error {
	return s.inTurn(ctx, "attach", want.ID, func(v *volume) error {
		if s.ended() {
			return ErrEnded
		}
		switch state := s.look(v); state {
		case Attached, Mounting, Mounted, Attaching:
			if !v.want.is(want) {
				return also(ErrOtherParameters, fmt.Errorf("it is %v already, from %s as %s with %q: detach it first", state, v.want.Path, v.want.FSType, v.want.Options))
			}
			if state != Attaching {
				return nil
			}
		case Lost, Leaving:
			if err := s.takeAway(ctx, v); err != nil {
				return also(ErrBusy, fmt.Errorf("what is left of its last disk is in the way: %w", err))
			}
		}
		if err := s.try(ctx, want.Path); err != nil {
			return err
		}
		return s.attach(ctx, v, want)
	})
}

// attach plugs a disk in, or goes on with that.
func (s *Sandbox) attach(ctx context.Context, v *volume, want Volume) error {
	s.mu.Lock()
	v.want = want
	s.mu.Unlock()
	s.decide(v, Attaching)
	place, err := s.machine.Attach(ctx, Disk{ID: DiskID(v.id), Path: want.Path, ReadOnly: want.ReadOnly})
	if err != nil && ctx.Err() != nil {
		return also(ErrOutcomeUnknown, err)
	}
	var point string
	if err == nil {
		point, err = guestpath.Of(place.Source)
	}
	if err != nil {
		err = s.named(v, err)
		s.decide(v, Leaving)
		if left := s.leave(ctx, v); left != nil {
			return fmt.Errorf("%w; what was done is not undone yet: %w", err, left)
		}
		return err
	}
	s.mu.Lock()
	v.place, v.point = place, point
	s.mu.Unlock()
	go s.watch(v, place)
	return s.decide(v, Attached).refuse()
}

// Mount has the agent mount an attached volume, and returns where in the guest.
func (s *Sandbox) Mount(ctx context.Context, id string) (guestPath string, err error) {
	err = s.inTurn(ctx, "mount", id, func(v *volume) error {
		was := s.look(v)
		if err := was.refuse(); err != nil {
			return err
		}
		if was == Attached {
			s.decide(v, Mounting)
		}
		if _, err := s.settle(ctx, v); err != nil {
			return err
		}
		s.hold(v, true)
		err := s.agent.CreateContainer(ctx, &agentpb.CreateContainerRequest{ContainerId: Holder(id), Storages: []*agentpb.Storage{v.storage(s.machine.Capabilities())}})
		if err != nil {
			if s.answered(ctx, v, err) {
				s.decide(v, was)
			}
			return fmt.Errorf("from %s: %w", v.want.Path, ofMount.typed(ctx, err))
		}
		guestPath = v.point
		return s.decide(v, Mounted).refuse()
	})
	if err != nil {
		return "", err
	}
	return guestPath, nil
}

// hold notes whether the guest may hold a volume for us: false ends late calls too.
func (s *Sandbox) hold(v *volume, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v.held, v.late = held, v.late && held
}

// answered reports whether a create or a remove that failed has ended, and notes where it
// may not have.
func (s *Sandbox) answered(ctx context.Context, v *volume, err error) bool {
	if isKnown(ctx, err) {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v.late = true
	return false
}

// settle makes sure that no call of ours of this volume is under way whose answer did not
// come: it could be carried out after the next one, which says the opposite. released says
// that nothing in the guest uses the disk either.
//
// An agent without directvol's own service cannot be asked. Whether it carries calls out
// in their order is its own: one that does not may mount, or unmount, behind the next
// call's OK.
func (s *Sandbox) settle(ctx context.Context, v *volume) (released bool, err error) {
	if !v.late {
		return false, nil
	}
	err = s.agent.CheckReleased(ctx, v.place.Driver, v.place.Source, Holder(v.id))
	switch {
	case err == nil:
		s.hold(v, false)
		return true, nil
	case lacksService(err):
		return false, nil
	case isKnown(ctx, err) && status.Code(err) == codes.FailedPrecondition:
		s.mu.Lock()
		defer s.mu.Unlock()
		v.late = false
		return false, nil
	default:
		return false, fmt.Errorf("whether an earlier call of it has ended is not known: %w", ofTake.typed(ctx, err))
	}
}

// Unmount has the agent unmount a volume, which stays attached.
func (s *Sandbox) Unmount(ctx context.Context, id string) error {
	return s.inTurn(ctx, "unmount", id, func(v *volume) error {
		switch s.look(v) {
		case Absent:
			return Absent.refuse()
		case Attaching, Leaving: // nobody holds it
			return nil
		}
		return s.unmount(ctx, v)
	})
}

// unmount has the agent let go of a volume. A call of ours may hold it though none was
// answered with OK. A remove ends a create that is under way; but one whose outcome nobody
// knows may come behind it, and then it is removed once more.
func (s *Sandbox) unmount(ctx context.Context, v *volume) error {
	was := s.look(v)
	for v.held {
		s.decide(v, Mounting)
		if err := s.agent.RemoveContainer(ctx, Holder(v.id)); err != nil {
			if s.answered(ctx, v, err) {
				s.decide(v, was)
			}
			return ofTake.typed(ctx, err)
		}
		late := v.late
		if _, err := s.settle(ctx, v); err != nil {
			return err
		}
		if !late || v.late { // it cannot be asked
			s.hold(v, false)
		}
	}
	s.decide(v, Attached)
	return nil
}

// Stats asks the agent for an attached volume's usage and condition. It waits for no
// other call, and answers with nobody else's: a place in the guest that was the volume's
// when the agent was asked, and is not when it has answered, may be another's.
func (s *Sandbox) Stats(ctx context.Context, id string) (*agentpb.VolumeStatsResponse, error) {
	state, point, err := s.where(id, nil)
	if err != nil {
		return nil, &Error{Call: "stats of", Volume: id, State: state, Err: err}
	}
	stats, err := s.agent.GetVolumeStats(ctx, point.path)
	state, _, moved := s.where(id, &point)
	switch {
	case moved != nil:
		err = moved
	case err != nil && state == Lost:
		err = also(ErrLost, err)
	case err != nil:
		err = ofStats.typed(ctx, err)
	case state == Lost && !stats.VolumeCondition.GetAbnormal():
		stats.VolumeCondition = &agentpb.VolumeCondition{Abnormal: true, Message: ErrLost.Error()}
	}
	if err != nil {
		return nil, &Error{Call: "stats of", Volume: id, State: state, Err: err}
	}
	return stats, nil
}

// point is where one attachment of a volume is mounted.
type point struct {
	path string
	gone <-chan struct{}
}

// where returns a volume's mount point, for as long as the place is its own; before, if
// it is not nil, is what it must still be.
func (s *Sandbox) where(id string, before *point) (State, point, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.volumes[id]
	if v == nil {
		return Absent, point{}, Absent.refuse()
	}
	state := s.lookLocked(v)
	if err := state.refuse(); err != nil && (state != Lost || v.point == "") {
		return state, point{}, err
	}
	now := point{v.point, v.place.Gone}
	if before != nil && *before != now {
		return state, point{}, also(ErrBusy, errors.New("it was attached anew meanwhile: ask again"))
	}
	return state, now, nil
}

// Resize makes a mounted volume's disk so many bytes large, and its filesystem
// fill it, while both are in use. It never makes anything smaller. Repeated, it
// goes on where it stopped.
func (s *Sandbox) Resize(ctx context.Context, id string, bytes uint64) error {
	return s.inTurn(ctx, "resize", id, func(v *volume) error {
		switch state := s.look(v); state {
		case Mounted:
		case Attached, Mounting:
			return also(ErrInfeasible, errors.New("it is not mounted: only the guest can grow its filesystem"))
		default:
			return state.refuse()
		}
		if !s.machine.Capabilities().Grow {
			return also(ErrInfeasible, errors.New("disks of this kind of machine do not grow while it runs"))
		}
		if err := s.canGrow(ctx, v.point, bytes); err != nil {
			return fmt.Errorf("its disk is as it was: %w", ofGrow.typed(ctx, err))
		}
		if err := s.machine.Answers(ctx, DiskID(id)); err != nil {
			return fmt.Errorf("its disk is as it was: %w", s.named(v, err))
		}
		if err := s.machine.Resize(ctx, DiskID(id), bytes); err != nil {
			if ctx.Err() != nil {
				err = also(ErrOutcomeUnknown, err)
			}
			return err
		}
		if err := s.agent.ResizeVolume(ctx, v.point, bytes); err != nil {
			return fmt.Errorf("its disk has %d bytes now: %w", bytes, ofGrow.typed(ctx, err))
		}
		return nil
	})
}

// canGrow asks the agent before the disk grows, which it does for good. Of an
// agent without directvol's own service it is known only whether the filesystem
// can grow at all: asked to go to its device's end, it changes next to nothing.
func (s *Sandbox) canGrow(ctx context.Context, guestPath string, bytes uint64) error {
	err := s.agent.CheckResizeVolume(ctx, guestPath, bytes)
	if err == nil || !lacksService(err) {
		return err
	}
	return s.agent.ResizeVolume(ctx, guestPath, 0)
}

// Detach unmounts a volume where it is mounted, and takes its disk away. A disk
// is never pulled from under a mount. A volume that is not attached is success.
func (s *Sandbox) Detach(ctx context.Context, id string) error {
	return s.inTurn(ctx, "detach", id, func(v *volume) error { return s.takeAway(ctx, v) })
}

// takeAway brings a volume from any state to absent.
func (s *Sandbox) takeAway(ctx context.Context, v *volume) error {
	if s.ended() {
		s.decide(v, Absent)
		return nil
	}
	asked := false
	switch s.look(v) {
	case Absent:
		return nil
	case Leaving:
		asked = true
	case Attached, Mounting, Mounted, Lost: // the place of a lost disk may still have a mount
		if err := s.unmount(ctx, v); err != nil {
			return err
		}
		if err := s.released(ctx, v); err != nil {
			return err
		}
	}
	if err := s.machine.Answers(ctx, DiskID(v.id)); err != nil {
		return s.named(v, err)
	}
	s.decide(v, Leaving)
	err := s.leave(ctx, v)
	if errors.Is(err, ErrHotplugHeld) && !asked && v.point != "" {
		s.decide(v, Attached)
	}
	return err
}

// hanging is a machine's refusal for a disk that hangs, which may be any of its disks.
type hanging interface {
	error
	HangingDisk() string
}

// named says which volume it is whose disk hangs, where that is another one.
func (s *Sandbox) named(v *volume, err error) error {
	hangs, ok := errors.AsType[hanging](err)
	if !ok || hangs.HangingDisk() == DiskID(v.id) {
		return err
	}
	for _, id := range s.Volumes() {
		if DiskID(id) == hangs.HangingDisk() {
			return fmt.Errorf("volume %s hangs: %w", id, err)
		}
	}
	return err
}

// released asks whether anything in the guest still uses a disk: other containers may,
// when ours has let go. Of an agent without directvol's own service nothing more is
// known than that ours has.
func (s *Sandbox) released(ctx context.Context, v *volume) error {
	err := s.agent.CheckReleased(ctx, v.place.Driver, v.place.Source, Holder(v.id))
	if err != nil && lacksService(err) {
		return nil
	}
	return ofTake.typed(ctx, err)
}

// leave has the machine let go of a disk, in the state leaving.
func (s *Sandbox) leave(ctx context.Context, v *volume) error {
	err := s.machine.Detach(ctx, DiskID(v.id))
	switch {
	case err == nil || s.ended():
		s.decide(v, Absent)
		return nil
	case errors.Is(err, ErrKept) && v.point != "":
		s.decide(v, Attached)
	}
	return also(ErrBusy, err)
}

// ended reports whether the machine has ended, with all its disks.
func (s *Sandbox) ended() bool {
	select {
	case <-s.machine.Done():
		return true
	default:
		return false
	}
}
