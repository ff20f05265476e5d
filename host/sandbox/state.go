package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/directvol/directvol/protocols/agentpb"
)

// State is a volume's state.
type State int

// The states, in the order in which a volume passes them. A call records the next state before it
// takes the step. So if the call is interrupted, the state tells what may have happened.
const (
	Absent    State = iota // the machine has nothing of the volume
	Attaching              // the disk, or a part of it, may be there
	Attached               // the disk is there, and nothing in the guest uses it
	Mounting               // a mount or an unmount is in progress, or was interrupted
	Mounted                // the agent has confirmed the mount
	Leaving                // nothing uses the disk, and it may leave at any moment
	Lost                   // the disk has left by itself; the guest may still have a mount of it
)

var stateNames = [...]string{"absent", "attaching", "attached", "mounting", "mounted", "leaving", "lost"}

// String returns the state's name.
func (s State) String() string { return stateNames[s] }

// volume is the sandbox's record of a volume. One call at a time changes it: the call that holds
// turn's token. Sandbox.mu guards the fields after turn, so that others can read them.
type volume struct {
	id    string
	turn  chan struct{}
	state State
	users int    // calls that have the turn or wait for it
	want  Volume // set in attaching and all later states
	place Place  // set in attached and all later states
	// point is the agent's mount point. held is true if the agent was asked to mount the volume and
	// is not known to have released it since. late is true if a create or remove call got no answer
	// and may still be carried out; held is then true too.
	point      string
	held, late bool
}

// take waits for a volume's turn, even if the volume does not exist yet, so that no other call can
// intervene.
func (s *Sandbox) take(ctx context.Context, id string) (v *volume, done func(), err error) {
	if err := checkID(id); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	v = s.volumes[id]
	if v == nil {
		v = &volume{id: id, turn: make(chan struct{}, 1)}
		s.volumes[id] = v
	}
	v.users++
	s.mu.Unlock()
	select {
	case v.turn <- struct{}{}:
		return v, func() { <-v.turn; s.leaveTurn(v) }, nil
	case <-ctx.Done():
		s.leaveTurn(v)
		return nil, nil, also(ErrBusy, fmt.Errorf("another call for it has not ended, a disk may not answer: %w", ctx.Err()))
	}
}

func (s *Sandbox) leaveTurn(v *volume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v.users--; v.users == 0 && v.state == Absent {
		delete(s.volumes, v.id)
	}
}

// inTurn waits for a volume's turn and runs do.
func (s *Sandbox) inTurn(ctx context.Context, call, id string, do func(*volume) error) error {
	v, done, err := s.take(ctx, id)
	if err != nil {
		return &Error{Call: call, Volume: id, State: s.State(id), Err: err}
	}
	defer done()
	if err := do(v); err != nil {
		return &Error{Call: call, Volume: id, State: s.look(v), Err: err}
	}
	return nil
}

// look returns a volume's state. If the disk is gone without a detach, look changes the state to
// Lost. Once the machine has ended, every volume is Absent.
func (s *Sandbox) look(v *volume) State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lookLocked(v)
}

func (s *Sandbox) lookLocked(v *volume) State {
	if s.ended() {
		return Absent
	}
	switch v.state {
	case Attached, Mounting, Mounted:
		select {
		case <-v.place.Gone:
			v.state = Lost
			s.log.WithField("volume", v.id).Errorf("its disk has left the machine without a detach: attach it again")
		default:
		}
	}
	return v.state
}

// decide records a state, before the step that it stands for. It returns the resulting state, which
// is Lost if the disk has left meanwhile.
func (s *Sandbox) decide(v *volume, state State) State {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.lookLocked(v); now != Lost || state == Leaving || state == Absent {
		v.state = state
	}
	if v.state == Absent {
		v.want, v.place, v.point, v.held, v.late = Volume{}, Place{}, "", false, false
	}
	return s.lookLocked(v)
}

// watch records when an attached disk is lost. It returns when the attachment or the machine ends.
func (s *Sandbox) watch(v *volume, place Place) {
	select {
	case <-place.Gone:
		s.look(v)
	case <-s.machine.Done():
	}
}

// State returns a volume's state; Absent for an unknown volume.
func (s *Sandbox) State(id string) State {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.volumes[id]; v != nil {
		return s.lookLocked(v)
	}
	return Absent
}

// Volumes returns the sorted ids of the volumes that are not absent.
func (s *Sandbox) Volumes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := slices.Sorted(maps.Keys(s.volumes))
	return slices.DeleteFunc(ids, func(id string) bool { return s.lookLocked(s.volumes[id]) == Absent })
}

// refuse returns why a volume in this state is not attached; nil if it is.
func (state State) refuse() error {
	switch state {
	case Absent:
		return also(ErrNotFound, errors.New("it is not attached"))
	case Attaching:
		return also(ErrBusy, errors.New("an attach of it was cut off: attach it again"))
	case Leaving:
		return also(ErrBusy, errors.New("its disk is leaving: detach it, or attach it again"))
	case Lost:
		return also(ErrLost, errors.New("its disk has left the machine without a detach: attach it again"))
	}
	return nil
}

// create returns the message that makes the agent mount a volume, or wait for its device.
func (v *volume) create(capable Capabilities) *agentpb.CreateContainerRequest {
	r := &agentpb.CreateContainerRequest{ContainerId: Holder(v.id)}
	if v.want.isRaw() {
		r.Devices = []*agentpb.Device{{Type: v.place.Driver, Id: v.place.Source, VmPath: v.point}}
	} else {
		r.Storages = []*agentpb.Storage{v.storage(capable)}
	}
	return r
}

// storage returns the message that makes the agent mount a volume.
func (v *volume) storage(capable Capabilities) *agentpb.Storage {
	options := v.want.Options
	if v.want.ReadOnly {
		options = append([]string{"ro"}, options...)
	}
	var promised []string
	if capable.Serial { // otherwise the agent might mount the slot's previous disk, if the guest still sees that one
		promised = []string{"serial=" + v.want.DiskID()}
	}
	return &agentpb.Storage{Driver: v.place.Driver, DriverOptions: promised, Source: v.place.Source, Fstype: v.want.FSType, Options: options, MountPoint: v.point}
}
