package sandbox_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/sandbox"
)

// ending is a machine that may have lost its vsock, and that ends only in the configured ways.
type ending struct {
	machine
	vsock   error
	button  bool // it has a power button
	works   bool // its guest obeys the power button
	stays   bool // it keeps running after a kill
	pressed *bool
}

func (e ending) VsockErr() error { return e.vsock }

func (e ending) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{PowerButton: e.button}
}

func (e ending) PressPower(context.Context) error {
	*e.pressed = true
	if e.works {
		e.die()
	}
	return nil
}

func (e ending) AwaitEnd(ctx context.Context) error {
	select {
	case <-e.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e ending) Kill(ctx context.Context) error {
	if !e.stays {
		e.die()
		return nil
	}
	<-ctx.Done()
	return errors.New("QEMU (process 7, state D) was killed and has not ended")
}

// refusing is an agent that answers DestroySandbox with err.
type refusing struct {
	agent
	err error
}

func (r refusing) DestroySandbox(context.Context) error { return r.err }

func TestStopTriesThePowerButtonBeforeItKills(t *testing.T) {
	lostVsock := errors.New("the vsock backend has ended")
	unreachable := status.Error(codes.Unavailable, "the agent is unreachable")
	for _, test := range []struct {
		name    string
		machine ending
		answer  error
		pressed bool
		took    time.Duration
		says    []string // words of the error; none for OK
	}{
		{"it is heard", ending{vsock: lostVsock, button: true, works: true}, unreachable, true, 0, nil},
		{"it is heard, and the call was cut off", ending{vsock: lostVsock, button: true, works: true}, agentclient.ErrOutcomeUnknown, true, 0, nil},
		{"nobody hears it", ending{vsock: lostVsock, button: true}, unreachable, true, time.Minute, []string{"power button", "killed", "unreachable"}},
		{"there is none", ending{vsock: lostVsock}, unreachable, false, 0, []string{"no power button", "killed"}},
		{"QEMU waits for a disk", ending{vsock: lostVsock, stays: true}, unreachable, false, 15 * time.Second, []string{"state D"}},
		{"a volume is in use", ending{button: true}, status.Error(codes.FailedPrecondition, "in use"), false, 0, []string{"in use"}},
		{"no answer ever comes, and the guest goes on", ending{button: true}, agentclient.ErrOutcomeUnknown, false, time.Minute, []string{"did not power off in time", "killed", agentclient.ErrOutcomeUnknown.Error()}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				test.machine.machine, test.machine.pressed = machine{w}, new(bool)
				s := sandbox.New(test.machine, refusing{agent{w}, test.answer}, fine)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				began := time.Now()
				err := s.Stop(ctx)
				if (err == nil) != (test.says == nil) {
					t.Errorf("want %q\ngot  %v", test.says, err)
				}
				for _, words := range test.says {
					if err == nil || !strings.Contains(err.Error(), words) {
						t.Errorf("want %q in it\ngot  %v", words, err)
					}
				}
				if took := time.Since(began); *test.machine.pressed != test.pressed || took != test.took {
					t.Errorf("pressed and took\nwant %v, %v\ngot  %v, %v", test.pressed, test.took, *test.machine.pressed, took)
				}
			})
		})
	}
}

func TestStopOfAVolumeInUseIsBusy(t *testing.T) {
	w := newWorld()
	s := sandbox.New(machine{w}, refusing{agent{w}, status.Error(codes.FailedPrecondition, "in use")}, fine)
	if err := s.Stop(t.Context()); !errors.Is(err, sandbox.ErrBusy) || status.Code(err) != codes.FailedPrecondition {
		t.Errorf("want %v\ngot  %v", sandbox.ErrBusy, err)
	}
}

// unheard is a machine that ends without a known reason.
type unheard struct{ machine }

func (u unheard) AwaitEnd(ctx context.Context) error {
	return errors.Join(u.machine.AwaitEnd(ctx), sandbox.ErrEnded, sandbox.ErrUnheard)
}

// ended is an agent whose guest ends when asked to, with answer as the answer.
type ended struct {
	agent
	answer error
}

func (e ended) DestroySandbox(context.Context) error {
	e.die()
	return e.answer
}

// If the agent answered OK, it had unmounted everything before. If it did not, the machine must
// report how it ended.
func TestStopSucceedsWithoutTheEventOfAPromisedEnd(t *testing.T) {
	for _, test := range []struct{ answer, want error }{{nil, nil}, {agentclient.ErrOutcomeUnknown, sandbox.ErrUnheard}} {
		w := newWorld()
		s := sandbox.New(unheard{machine{w}}, ended{agent{w}, test.answer}, fine)
		for range 2 {
			if err := s.Stop(t.Context()); !errors.Is(err, test.want) {
				t.Errorf("the agent answers %v\nwant %v\ngot  %v", test.answer, test.want, err)
			}
		}
	}
}

// losing is an agent whose first calls are lost together with their answers.
type losing struct {
	agent
	answers *[]error // nil means that the guest powers off
}

func (l losing) DestroySandbox(context.Context) error {
	next := (*l.answers)[0]
	if *l.answers = (*l.answers)[1:]; next == nil {
		l.die()
	}
	return next
}

func TestStopAsksAgainWhereItsOutcomeIsUnknown(t *testing.T) {
	unreachable := status.Error(codes.Unavailable, "the agent is unreachable")
	inUse := status.Error(codes.FailedPrecondition, "in use")
	for _, test := range []struct {
		name    string
		answers []error
		want    error
	}{
		{"the call was lost", []error{agentclient.ErrOutcomeUnknown, nil}, nil},
		{"twice, and it was out of reach", []error{agentclient.ErrOutcomeUnknown, unreachable, agentclient.ErrOutcomeUnknown, nil}, nil},
		{"it is refused then", []error{agentclient.ErrOutcomeUnknown, inUse}, sandbox.ErrBusy},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld()
			defer w.die()
			s := sandbox.New(ending{machine: machine{w}, pressed: new(bool)}, losing{agent{w}, &test.answers}, fine)
			if err := s.Stop(t.Context()); !errors.Is(err, test.want) || len(test.answers) > 0 {
				t.Errorf("%s, and %d calls were not made\nwant %v\ngot  %v", test.name, len(test.answers), test.want, err)
			}
			if w.dead() != (test.want == nil) {
				t.Errorf("%s\nwant the machine ended: %v\ngot  %v", test.name, test.want == nil, w.dead())
			}
		})
	}
}

func TestStopWithoutADeadlineEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		s := sandbox.New(ending{machine: machine{w}, pressed: new(bool)}, refusing{agent{w}, agentclient.ErrOutcomeUnknown}, fine)
		began := time.Now()
		if err := s.Stop(context.Background()); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 5*time.Minute {
			t.Errorf("after %v\nwant %v\ngot  %v", time.Since(began), context.DeadlineExceeded, err)
		}
	})
}
