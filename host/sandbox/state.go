package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/directvol/directvol/protocols/agentpb"
)

// State is where a volume is on its way.
type State int

// The states, in the order of the way. A call writes down the next one before it makes
// the step: where it is cut off, the state says what may have happened since.
const (
	Absent    State = iota // the machine has nothing of it
	Attaching              // its disk may be there, or a part of it
	Attached               // its disk is there, and nobody in the guest holds it
	Mounting               // a mount or an unmount is under way, or was cut off
	Mounted                // the agent has said so
	Leaving                // nobody holds it, and its disk may go at any moment
	Lost                   // its disk has left by itself; the guest may still have a mount of it
)

var stateNames = [...]string{"absent", "attaching", "attached", "mounting", "mounted", "leaving", "lost"}

// String returns the state as a word.
func (s State) String() string { return stateNames[s] }

// volume is what is known of a volume. One call at a time changes it, which has turn's
// token; Sandbox.mu guards what follows that, so that others can look.
type volume struct {
	id    string
	turn  chan struct{}
	state State
	users int    // calls that have the turn, or wait for it
	want  Volume // from attaching on
	place Place  // from attached on
	// point is where the agent mounts it, and held says that it was asked to, and not
	// known to have let go since. late says that a create or a remove of ours has had no
	// answer, and may still be carried out: held is true then too.
	point      string
	held, late bool
}

// take waits for a volume's turn, of one that is not there too: so nobody comes between.
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
		return nil, nil, also(ErrBusy, fmt.Errorf("another call is at it and has not ended, a disk may not answer: %w", ctx.Err()))
	}
}

func (s *Sandbox) leaveTurn(v *volume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v.users--; v.users == 0 && v.state == Absent {
		delete(s.volumes, v.id)
	}
}

// inTurn runs do in a volume's turn.
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

// look returns a volume's state. A disk that is gone though nobody takes it is lost from
// the moment on at which somebody looks. A machine that has ended has none.
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
			s.log.WithField("volume", v.id).Errorf("its disk has left the machine, and nobody detached it: attach it again")
		default:
		}
	}
	return v.state
}

// decide writes a state down, before the step that it stands for. It returns what the
// state is: lost where the disk has left meanwhile.
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

// watch says of an attachment that it is lost, and ends with it.
func (s *Sandbox) watch(v *volume, place Place) {
	select {
	case <-place.Gone:
		s.look(v)
	case <-s.machine.Done():
	}
}

// State returns a volume's state; that of one that nobody knows is Absent.
func (s *Sandbox) State(id string) State {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.volumes[id]; v != nil {
		return s.lookLocked(v)
	}
	return Absent
}

// Volumes returns the ids of the volumes that are not absent, in their order.
func (s *Sandbox) Volumes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := slices.Sorted(maps.Keys(s.volumes))
	return slices.DeleteFunc(ids, func(id string) bool { return s.lookLocked(s.volumes[id]) == Absent })
}

// refuse says why a volume in a state is not attached.
func (state State) refuse() error {
	switch state {
	case Absent:
		return also(ErrNotFound, errors.New("it is not attached"))
	case Attaching:
		return also(ErrBusy, errors.New("an attach of it was cut off: attach it again"))
	case Leaving:
		return also(ErrBusy, errors.New("its disk is leaving: detach it, or attach it again"))
	case Lost:
		return also(ErrLost, errors.New("its disk has left the machine by itself: attach it again"))
	}
	return nil
}

// storage is the message that has the agent mount a volume.
func (v *volume) storage(capable Capabilities) *agentpb.Storage {
	options := v.want.Options
	if v.want.ReadOnly {
		options = append([]string{"ro"}, options...)
	}
	var promised []string
	if capable.Serial { // the guest may still see the disk that had the place before
		promised = []string{"serial=" + v.want.DiskID()}
	}
	return &agentpb.Storage{Driver: v.place.Driver, DriverOptions: promised, Source: v.place.Source, Fstype: v.want.FSType, Options: options, MountPoint: v.point}
}
