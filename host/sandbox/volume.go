package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/guestpath"
)

// Volume describes a volume for a sandbox.
type Volume struct {
	// ID is the caller's name for the volume: any 1 to 128 bytes.
	ID string
	// Path is the volume's store on the host: an image file or a block device that contains a
	// filesystem and nothing else.
	Path string
	// FSType is ext3, ext4, xfs or btrfs. Options are mount options. If FSType is empty, the volume
	// is the block device alone, with any content and no options: Mount only waits until the guest
	// has the disk, Resize ends when the guest sees the new size, and Stats has its capacity and no
	// condition, because the agent does not examine it.
	FSType   string
	Options  []string
	ReadOnly bool
}

// isRaw reports whether the volume is a block device without a mount.
func (v Volume) isRaw() bool { return v.FSType == "" }

// refuse refuses a volume that the machine, or any machine, could not have.
func (v Volume) refuse(capable Capabilities) error {
	switch {
	case !v.isRaw():
		return nil
	case len(v.Options) > 0:
		return also(ErrInfeasible, fmt.Errorf("it has no filesystem type, and so no mount options: got %q", v.Options))
	case !capable.Serial:
		return also(ErrInfeasible, errors.New("it has no filesystem type, and disks of this kind of machine have no serial by which the guest finds the device"))
	}
	return nil
}

func (v Volume) is(other Volume) bool {
	return v.Path == other.Path && v.FSType == other.FSType && v.ReadOnly == other.ReadOnly && slices.Equal(v.Options, other.Options)
}

// Attach attaches a volume's disk to the machine. The guest does not use the disk yet. Repeating it
// with the same volume changes nothing.
func (s *Sandbox) Attach(ctx context.Context, want Volume) error {
	return s.inTurn(ctx, "attach", want.ID, func(v *volume) error {
		if s.ended() {
			return ErrEnded
		}
		if err := want.refuse(s.machine.Capabilities()); err != nil {
			return err
		}
		switch state := s.look(v); state {
		case Attached, Mounting, Mounted, Attaching:
			if !v.want.is(want) {
				return also(ErrOtherParameters, fmt.Errorf("it is already %v, from %s as %s with %q: detach it first", state, v.want.Path, v.want.FSType, v.want.Options))
			}
			if state != Attaching {
				return nil
			}
		case Lost, Leaving:
			if err := s.takeAway(ctx, v); err != nil {
				return also(ErrBusy, fmt.Errorf("its last disk is not removed completely: %w", err))
			}
		}
		if err := s.try(ctx, want.Path); err != nil {
			return err
		}
		return s.attach(ctx, v, want)
	})
}

// attach attaches the disk, or resumes an interrupted attach.
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
		point, err = want.pointOf(place)
	}
	if err != nil {
		err = s.named(v, err)
		s.decide(v, Leaving)
		if left := s.leave(ctx, v); left != nil {
			return fmt.Errorf("%w; the call is only partly undone: %w", err, left)
		}
		return err
	}
	s.mu.Lock()
	v.place, v.point = place, point
	s.mu.Unlock()
	go s.watch(v, place)
	return s.decide(v, Attached).refuse()
}

// pointOf returns the volume's path in the guest. The path of a volume without a mount is udev's
// name for the disk, which the agent knows also in a guest without udev.
func (v Volume) pointOf(place Place) (string, error) {
	if v.isRaw() {
		return "/dev/disk/by-id/virtio-" + v.DiskID(), nil
	}
	return guestpath.Of(place.Source)
}

// Mount makes the agent mount an attached volume, and returns its path in the guest.
func (s *Sandbox) Mount(ctx context.Context, id string) (guestPath string, err error) {
	err = s.inTurn(ctx, "mount", id, func(v *volume) error {
		was := s.look(v)
		if err := was.refuse(); err != nil {
			return err
		}
		if was == Attached {
			s.decide(v, Mounting)
		}
		if err := s.settle(ctx, v); err != nil {
			return err
		}
		s.hold(v, true)
		err := s.agent.CreateContainer(ctx, v.create(s.machine.Capabilities()))
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

// hold records whether the guest may hold a volume for this sandbox. false also means that no call
// is late any more.
func (s *Sandbox) hold(v *volume, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v.held, v.late = held, v.late && held
}

// answered reports whether a failed create or remove has certainly ended. If not, it records the
// call as late.
func (s *Sandbox) answered(ctx context.Context, v *volume, err error) bool {
	if isKnown(ctx, err) {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	v.late = true
	return false
}

// settle asks the agent whether an earlier create or remove of this volume that got no answer may
// still be carried out, and fails if it may or if that is not known. Otherwise the agent could
// carry it out after the next call, which may request the opposite.
//
// An agent without directvol's own service cannot be asked. settle then returns nil and v.late
// stays set: if such an agent does not carry out calls in their order, it may mount or unmount the
// volume after the next call's OK.
func (s *Sandbox) settle(ctx context.Context, v *volume) error {
	if !v.late {
		return nil
	}
	err := s.agent.CheckReleased(ctx, v.place.Driver, v.place.Source, Holder(v.id))
	switch {
	case err == nil:
		s.hold(v, false)
		return nil
	case agentclient.LacksService(err):
		return nil
	case isKnown(ctx, err) && status.Code(err) == codes.FailedPrecondition:
		s.mu.Lock()
		defer s.mu.Unlock()
		v.late = false
		return nil
	default:
		return fmt.Errorf("an earlier call for it may not have ended: %w", ofTake.typed(ctx, err))
	}
}

// Unmount makes the agent unmount a volume. The volume stays attached.
func (s *Sandbox) Unmount(ctx context.Context, id string) error {
	return s.inTurn(ctx, "unmount", id, func(v *volume) error {
		switch s.look(v) {
		case Absent:
			return Absent.refuse()
		case Attaching, Leaving: // nothing in the guest uses the disk
			return nil
		}
		return s.unmount(ctx, v)
	})
}

// unmount makes the agent release a volume. The guest may hold the volume even if no create was
// answered with OK. A remove ends a create that is in progress. But a create with unknown outcome
// may be carried out after the remove; unmount then removes the container once more.
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
		if err := s.settle(ctx, v); err != nil {
			return err
		}
		if !late || v.late { // the agent cannot be asked about late calls
			s.hold(v, false)
		}
	}
	s.decide(v, Attached)
	return nil
}

// Stats asks the agent for an attached volume's usage and condition. It does not wait for other
// calls. It never returns another volume's statistics: if the volume's place in the guest has
// changed by the time of the answer, Stats fails with ErrBusy.
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

// point is the mount point of one attachment of a volume.
type point struct {
	path string
	gone <-chan struct{}
}

// where returns a volume's mount point while the volume owns it. If before is not nil, where fails
// unless the mount point and the attachment are still the same.
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
		return state, point{}, also(ErrBusy, errors.New("it was attached again meanwhile: ask again"))
	}
	return state, now, nil
}

// Resize grows a mounted volume's disk to the given number of bytes and grows its filesystem to
// fill the disk, while both are in use. It never shrinks anything. Repeating it resumes where it
// stopped.
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
			return fmt.Errorf("its disk is unchanged: %w", ofGrow.typed(ctx, err))
		}
		if err := s.machine.Answers(ctx, DiskID(id)); err != nil {
			return fmt.Errorf("its disk is unchanged: %w", s.named(v, err))
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

// canGrow asks the agent whether the filesystem can grow, before the disk grows, because the disk
// cannot shrink again. An agent without directvol's own service is asked to grow the filesystem to
// the device's end instead: that changes almost nothing, and shows whether the filesystem can grow
// at all.
func (s *Sandbox) canGrow(ctx context.Context, guestPath string, bytes uint64) error {
	err := s.agent.CheckResizeVolume(ctx, guestPath, bytes)
	if err == nil || !agentclient.LacksService(err) {
		return err
	}
	return s.agent.ResizeVolume(ctx, guestPath, 0)
}

// Detach unmounts a volume if it is mounted, and removes its disk. It never removes a disk under a
// mount. Detaching a volume that is not attached succeeds.
func (s *Sandbox) Detach(ctx context.Context, id string) error {
	return s.inTurn(ctx, "detach", id, func(v *volume) error { return s.takeAway(ctx, v) })
}

// takeAway brings a volume from any state to Absent.
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
	case Attached, Mounting, Mounted, Lost: // a lost disk may still be mounted
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
	if errors.Is(err, ErrNotAsked) && !asked && v.point != "" {
		s.decide(v, Attached)
	}
	return err
}

// hanging is a machine's error about a disk that hangs. The disk may be any of the machine's disks.
type hanging interface {
	error
	HangingDisk() string
}

// named adds to err the id of the volume whose disk hangs, if that is another volume than v.
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

// released checks that nothing in the guest uses a disk any more: after the sandbox's own container
// has released it, other containers may still use it. For an agent without directvol's own service
// this check is skipped.
func (s *Sandbox) released(ctx context.Context, v *volume) error {
	err := s.agent.CheckReleased(ctx, v.place.Driver, v.place.Source, Holder(v.id))
	if err != nil && agentclient.LacksService(err) {
		return nil
	}
	return ofTake.typed(ctx, err)
}

// leave makes the machine release a disk whose volume is in the state leaving.
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
