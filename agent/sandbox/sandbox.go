// Package sandbox is the sandbox and its containers. Each is a thing of its own with
// one call at a time. A call goes on when its caller's time is over: until all that it
// did is done, or undone, the next call of the same container waits. So there is no
// moment at which a call finds what another one is about to take away.
//
//	call               beside a create      beside a remove     beside a destroy
//	create container   waits for it         waits for it        waits for it
//	remove container   ends it, waits       waits for it        waits for it
//	create sandbox     waits (sandbox's)    waits for none      waits for it
//	destroy            ends it, waits       waits for it        waits for it
//
// Each waits until its own caller's time is over, and then says for what.
package sandbox

import (
	"context"
	"errors"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/turns"
	"github.com/directvol/directvol/protocols/agentpb"
)

// Storages is what a sandbox needs of storage.Table, which says what they do.
type Storages interface {
	Hold(ctx context.Context, holder string, storages []*agentpb.Storage, agreed func() bool) error
	Release(ctx context.Context, holder string) error
	ReleaseAll(ctx context.Context, agreed func() bool) error
	Update(ctx context.Context, storages []*agentpb.Storage) error
	Ended() bool
	End(ended bool) error
}

// Sandbox is one, with its containers.
type Sandbox struct {
	log      *logrus.Entry
	storages Storages
	turns    turns.Turns // by container; storage.Sandbox is the sandbox's own
	gate     gate

	mu      sync.Mutex
	creates map[string]context.CancelCauseFunc // under way, by container
}

// New returns a sandbox whose containers hold storages.
func New(log *logrus.Entry, storages Storages) *Sandbox {
	return &Sandbox{log: log, storages: storages, gate: newGate(), creates: map[string]context.CancelCauseFunc{}}
}

// Create makes the sandbox, again after Destroy, and holds its own storages. Where it
// fails the sandbox is as it was.
func (s *Sandbox) Create(ctx context.Context, storages []*agentpb.Storage) error {
	return s.create(ctx, "the sandbox", storage.Sandbox, func(ctx context.Context, agreed func() bool) error {
		ended := s.storages.Ended()
		if err := s.storages.End(false); err != nil {
			return err
		}
		err := s.storages.Hold(ctx, storage.Sandbox, storages, agreed)
		if err != nil && ended {
			err = errors.Join(err, s.storages.End(true))
		}
		return err
	})
}

// CreateContainer holds a container's storages. Repeated, it changes nothing.
func (s *Sandbox) CreateContainer(ctx context.Context, id string, storages []*agentpb.Storage) error {
	return s.create(ctx, "container "+id, id, func(ctx context.Context, agreed func() bool) error {
		return s.storages.Hold(ctx, id, storages, agreed)
	})
}

// releaseLimit bounds how long a call that unmounts waits for a device that
// hangs: the answer that says so has to arrive before the caller gives up, and
// Kata's and our own clients wait for 10 s or more.
const releaseLimit = 8 * time.Second

// Reasons to end a create that its caller still waits for.
var (
	errRemoved   = errors.New("it was removed while it was created")
	errDestroyed = errors.New("the sandbox was destroyed while it was created")
)

// create has do run in the turn of a thing, until its caller's time is over or the
// thing is removed: do asks agreed before it holds anything for good.
func (s *Sandbox) create(ctx context.Context, what, id string, do func(ctx context.Context, agreed func() bool) error) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	var decided atomic.Bool // by do, that it succeeds, or by the caller, who has gone
	return s.call(ctx, what, s.inTurn(id), &decided, func(ctx context.Context) error {
		s.begin(id, giveUp)
		defer s.end(id)
		err := do(ctx, decides(ctx, &decided))
		if cause := context.Cause(ctx); errors.Is(cause, errRemoved) || errors.Is(cause, errDestroyed) {
			if err != nil {
				return refusal.New(refusal.FailedPrecondition, "%s: %w: %w", what, cause, err)
			}
		}
		return err
	})
}

// decides returns what a call asks at its end: whether its caller is still there, who
// learns then that it has succeeded.
func decides(ctx context.Context, decided *atomic.Bool) func() bool {
	return func() bool { return ctx.Err() == nil && decided.CompareAndSwap(false, true) }
}

// RemoveContainer has a container let go of what it holds. A create that is under
// way is ended. OK means that nothing of the container is held, or about to be.
func (s *Sandbox) RemoveContainer(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, releaseLimit)
	defer cancel()
	s.interrupt(id, errRemoved)
	return s.call(ctx, "container "+id, s.inTurn(id), nil, func(ctx context.Context) error {
		return s.storages.Release(ctx, id)
	})
}

// Destroy unmounts everything, and takes nothing until Create. Where it fails the
// sandbox and its containers are as they were.
func (s *Sandbox) Destroy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, releaseLimit)
	defer cancel()
	s.interruptAll(errDestroyed)
	alone := func(ctx context.Context) (func(), error) {
		if err := s.gate.close(ctx); err != nil {
			return nil, err
		}
		return s.gate.open, nil
	}
	var decided atomic.Bool
	return s.call(ctx, "the sandbox", alone, &decided, func(ctx context.Context) error {
		return s.storages.ReleaseAll(ctx, decides(ctx, &decided))
	})
}

// Update gives ephemeral storages new options.
func (s *Sandbox) Update(ctx context.Context, storages []*agentpb.Storage) error {
	return s.call(ctx, "the update", s.gate.enter, nil, func(ctx context.Context) error {
		return s.storages.Update(ctx, storages)
	})
}

// inTurn waits for a thing's turn, and for the end of a Destroy.
func (s *Sandbox) inTurn(id string) func(context.Context) (func(), error) {
	return func(ctx context.Context) (func(), error) {
		leave, err := s.gate.enter(ctx)
		if err != nil {
			return nil, err
		}
		done, err := s.turns.Take(ctx, id)
		if err != nil {
			leave()
			return nil, err
		}
		return func() { done(); leave() }, nil
	}
}

// call has do run when its turn has come, which ends with do. Its caller is answered
// before his time is over, though do may go on: not where do has decided that it
// succeeds.
func (s *Sandbox) call(ctx context.Context, what string, turn func(context.Context) (done func(), err error), decided *atomic.Bool, do func(context.Context) error) error {
	ctx, cancel := deadline.Early(ctx)
	defer cancel()
	done, err := turn(ctx)
	if err != nil {
		return s.late(ctx, "%s: another call of it goes on, a disk may not answer: %w", what, context.Cause(ctx))
	}
	answer := make(chan error, 1)
	go func() {
		defer done()
		answer <- s.safely(what, func() error { return do(ctx) })
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
	}
	if decided != nil && !decided.CompareAndSwap(false, true) {
		return <-answer // which comes at once
	}
	select {
	case err := <-answer:
		return err
	default:
		return s.late(ctx, "%s: not done in time, a disk may not answer: call again: %w", what, context.Cause(ctx))
	}
}

// late is the answer to who has waited long enough, or was interrupted.
func (s *Sandbox) late(ctx context.Context, format string, args ...any) error {
	if cause := context.Cause(ctx); errors.Is(cause, errRemoved) || errors.Is(cause, errDestroyed) {
		return refusal.New(refusal.FailedPrecondition, format, args...)
	}
	return refusal.New(refusal.DeadlineExceeded, format, args...)
}

// safely turns a panic into an error: nobody above a call's goroutine does.
func (s *Sandbox) safely(what string, do func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Errorf("%s: panic: %v\n%s", what, p, debug.Stack())
			err = refusal.New(refusal.Internal, "%s: the agent has a bug, its log says more", what)
		}
	}()
	return do()
}

func (s *Sandbox) begin(id string, giveUp context.CancelCauseFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creates[id] = giveUp
}

func (s *Sandbox) end(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.creates, id)
}

func (s *Sandbox) interrupt(id string, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if giveUp := s.creates[id]; giveUp != nil {
		giveUp(cause)
	}
}

func (s *Sandbox) interruptAll(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, giveUp := range s.creates {
		giveUp(cause)
	}
}
