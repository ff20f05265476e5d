package sandbox_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/directvol/directvol/host/sandbox"
)

// booting is an agent that gives the listed answers to Check in order; nil means no answer.
type booting struct {
	agent
	answers *[]func(context.Context) error
}

func (b booting) Check(ctx context.Context) error {
	answer := (*b.answers)[0]
	*b.answers = (*b.answers)[1:]
	return answer(ctx)
}

func silence(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// A booting guest may lose a request: the agent must be asked again, but not after the caller's
// context has ended.
func TestAgentThatBootsIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		defer w.die()
		answers := []func(context.Context) error{silence, silence, func(context.Context) error { return nil }}
		s := sandbox.New(machine{w}, booting{agent{w}, &answers}, fine)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		if err := s.AwaitAgent(ctx); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took != 10*time.Second {
			t.Errorf("two questions without an answer took\nwant 10s\ngot  %v", took)
		}
	})
}

// cutOff is a machine that still runs although its vsock has ended.
type cutOff struct{ machine }

func (cutOff) VsockDone() <-chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}

func (cutOff) AwaitEnd(ctx context.Context) error { return silence(ctx) }

// A vsock may end a moment before its machine does, or alone. In the latter case the error must be
// the agent client's.
func TestVsockThatEndsAloneIsNoEndOfTheMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		defer w.die()
		unreachable := errors.New("no vsock")
		answers := []func(context.Context) error{func(context.Context) error { return unreachable }}
		s := sandbox.New(cutOff{machine{w}}, booting{agent{w}, &answers}, fine)
		began := time.Now()
		if err := s.AwaitAgent(t.Context()); !errors.Is(err, unreachable) || errors.Is(err, sandbox.ErrEnded) {
			t.Errorf("want %v\ngot  %v", unreachable, err)
		}
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("the machine's end was waited for\nwant 5s\ngot  %v", took)
		}
	})
}
