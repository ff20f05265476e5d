// Package sandbox is the sandbox and its containers. Each is a thing of its own with
// one call at a time. A call goes on when its caller's time is over: until all that it
// did is done, or undone, the next call of the same container waits. So there is no
// moment at which a call finds what another one is about to take away.
//
//	call               beside a create of   beside a remove of  beside a destroy
//	                   the same             the same
//	create container   waits for it         waits for it        waits for it
//	remove container   ends it, waits       waits for it        waits for it
//	create sandbox     waits for it         has no remove       waits for it
//	destroy            ends any, waits      waits for any       waits for it
//
// Calls have the order in which they arrived (agent/arrival), also where they wait.
//
// Each waits until its own caller's time is over, and then says for what. A destroy
// does not wait beside a call that was given up and goes on, as on a disk that hangs:
// it would keep every other container waiting too.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/arrival"
	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/guest"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/turns"
	"github.com/directvol/directvol/protocols/agentpb"
)

// Storages is what a sandbox needs of storage.Table, which says what they do.
type Storages interface {
	Hold(ctx context.Context, holder string, storages []*agentpb.Storage, agreed func() bool) error
	Release(ctx context.Context, holder string) error
	ReleaseAll(ctx context.Context, agreed func() bool) error
	UnmountEach(ctx context.Context) error
	Update(ctx context.Context, storages []*agentpb.Storage) error
	AwaitDevices(ctx context.Context, devices []*agentpb.Device) error
	CheckReleased(ctx context.Context, driver, source string) error
	Ended() bool
	End(ended bool) error
	Waiting(holders ...string) []string
}

// Sandbox is one, with its containers.
type Sandbox struct {
	log      *logrus.Entry
	storages Storages
	turns    turns.Turns // by container; storage.Sandbox is the sandbox's own
	gate     gate

	Guest guest.Guest // that the sandbox is in

	// Sync, where it is set, has all disks take what was written, before a Destroy changes
	// anything: what no storage of ours is on too. It names the disk that does not.
	Sync func(context.Context) error

	mu      sync.Mutex
	creates map[*create]bool // under way, or waiting for their turn
}

// create is one that can be ended.
type create struct {
	id     string
	giveUp context.CancelCauseFunc
}

// New returns a sandbox whose containers hold storages.
func New(log *logrus.Entry, storages Storages) *Sandbox {
	return &Sandbox{log: log, storages: storages, gate: newGate(), creates: map[*create]bool{}}
}

// step is a part of a create that comes before its storages, in its turn. undo, which
// may be nil, is called where a later part fails.
type step func(context.Context) (undo func() error, err error)

// Settings are what a sandbox sets of its guest; package guest says what each may be.
type Settings struct {
	Modules  []*agentpb.KernelModule
	Resolver []string // lines of resolv.conf(5)
	Hostname string
}

// Create makes the sandbox, again after Destroy: it sets what the guest is to have, and holds
// the sandbox's own storages. Where it fails the sandbox is as it was, but for modules, which
// stay; after a Destroy no other call is made meanwhile.
func (s *Sandbox) Create(ctx context.Context, set Settings, storages []*agentpb.Storage) error {
	return s.createSandbox(ctx, storages,
		func(context.Context) (func() error, error) { return nil, s.Guest.LoadModules(set.Modules) },
		func(context.Context) (func() error, error) { return s.Guest.SetResolver(set.Resolver) },
		func(context.Context) (func() error, error) { return s.Guest.SetHostname(set.Hostname) })
}

func (s *Sandbox) createSandbox(ctx context.Context, storages []*agentpb.Storage, before ...step) error {
	err := s.createIn(ctx, s.inTurn(storage.Sandbox), false, storages, before)
	if errors.Is(err, errAgain) {
		err = s.createIn(ctx, s.alone, true, storages, before)
	}
	return err
}

// errAgain is of a sandbox that is destroyed, when it is to be made beside others.
var errAgain = errors.New("after a destroy a sandbox is made alone")

func (s *Sandbox) createIn(ctx context.Context, turn turn, alone bool, storages []*agentpb.Storage, before []step) error {
	return s.create(ctx, "the sandbox", storage.Sandbox, turn, func(ctx context.Context, agreed func() bool) error {
		ended := s.storages.Ended()
		if ended && !alone {
			return errAgain
		}
		if err := s.storages.End(false); err != nil {
			return err
		}
		err := s.hold(ctx, storage.Sandbox, storages, agreed, before)
		if err != nil && ended {
			err = errors.Join(err, s.storages.End(true))
		}
		return err
	})
}

// hold takes the steps and holds storages. Where it fails, it has undone the steps.
func (s *Sandbox) hold(ctx context.Context, holder string, storages []*agentpb.Storage, agreed func() bool, before []step) error {
	if len(before) == 0 {
		return s.storages.Hold(ctx, holder, storages, agreed)
	}
	undo, err := before[0](ctx)
	if err != nil {
		return err
	}
	if err = s.hold(ctx, holder, storages, agreed, before[1:]); err != nil && undo != nil {
		err = errors.Join(err, undo())
	}
	return err
}

// releaseLimit bounds how long a call that unmounts waits whose caller does not say how
// long he does: Kata's clients and our own wait for 10 s or more.
const releaseLimit = 8 * time.Second

// limited returns a context that ends with the caller's time, or after releaseLimit.
func limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, releaseLimit)
}

// Reasons to end a create that its caller still waits for.
var (
	errRemoved   = errors.New("it was removed while it was created")
	errDestroyed = errors.New("DestroySandbox was called while it was created")
)

// create has do run in the turn of a thing, until its caller's time is over or the
// thing is removed: do asks agreed before it holds anything for good.
func (s *Sandbox) create(ctx context.Context, what, id string, turn turn, do func(ctx context.Context, agreed func() bool) error) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	defer s.begin(&create{id, giveUp})()
	var decided atomic.Bool // by do, that it succeeds, or by the caller, who has gone
	return s.call(ctx, thing{what, holdersOf(id)}, turn, &decided, func(ctx context.Context) error {
		err := do(ctx, decides(ctx, &decided))
		if cause := context.Cause(ctx); errors.Is(cause, errRemoved) || errors.Is(cause, errDestroyed) {
			if err != nil {
				return errkind.New(errkind.FailedPrecondition, "%s: %w: %w", what, cause, err)
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

// Destroy unmounts everything, and takes nothing until Create. Where it fails the
// sandbox and its containers are as they were.
func (s *Sandbox) Destroy(ctx context.Context) error {
	ctx, cancel := limited(ctx)
	defer cancel()
	s.interrupt(errDestroyed, func(*create) bool { return true })
	var decided atomic.Bool
	return s.call(ctx, thing{what: "the sandbox"}, s.alone, &decided, func(ctx context.Context) error {
		if s.Sync != nil {
			if err := s.Sync(ctx); err != nil {
				return err
			}
		}
		return s.storages.ReleaseAll(ctx, decides(ctx, &decided))
	})
}

// UnmountEach unmounts what can be unmounted, for the guest's end.
func (s *Sandbox) UnmountEach(ctx context.Context) error {
	return s.call(ctx, thing{what: "the guest's end"}, func(context.Context) (func(), error) { return func() {}, nil }, nil, s.storages.UnmountEach)
}

// Update gives ephemeral storages new options.
func (s *Sandbox) Update(ctx context.Context, storages []*agentpb.Storage) error {
	enter := func(ctx context.Context) (func(), error) {
		leave, err := s.gate.enter(ctx)
		arrival.Joined(ctx)
		return leave, err
	}
	return s.call(ctx, thing{what: "the update"}, enter, nil, func(ctx context.Context) error {
		return s.storages.Update(ctx, storages)
	})
}

// turn waits until a call may be made, which done ends. Its error says for what.
type turn func(context.Context) (done func(), err error)

// inTurn waits for a thing's turn, and for the end of a Destroy.
func (s *Sandbox) inTurn(id string) turn {
	return func(ctx context.Context) (func(), error) {
		leave, err := s.gate.enter(ctx)
		if err != nil {
			return nil, fmt.Errorf("the sandbox is being destroyed, a disk may not answer: %w", err)
		}
		place := s.turns.Join(id)
		arrival.Joined(ctx)
		if err := place.Await(ctx); err != nil {
			place.Leave()
			leave()
			return nil, fmt.Errorf("another call of it goes on, a disk may not answer%s: %w", s.waiting(holdersOf(id)), context.Cause(ctx))
		}
		return func() { place.Leave(); leave() }, nil
	}
}

// alone waits until no call is under way.
func (s *Sandbox) alone(ctx context.Context) (func(), error) {
	if err := s.gate.close(ctx); err != nil {
		return nil, fmt.Errorf("calls of its containers go on, a disk may not answer%s: %w", s.waiting(nil), err)
	}
	return s.gate.open, nil
}

// thing is what a call is about, and whose disks it may wait for: everybody's where nobody
// is named.
type thing struct {
	what    string
	holders []string
}

func containerOf(id string) thing { return thing{"container " + id, holdersOf(id)} }

// holdersOf are those whose storages a container's calls make or let go of: what is shared
// is the sandbox's.
func holdersOf(id string) []string { return []string{id, storage.Sandbox} }

// waiting lists, in brackets, the disks that calls are at.
func (s *Sandbox) waiting(holders []string) string {
	all := s.storages.Waiting(holders...)
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, ", ") + ")"
}

// call waits for its turn and runs do in it; the turn ends when do returns. The caller
// is answered before its deadline, and do may go on behind that. Once do has decided
// that it succeeds, the caller waits for its answer.
func (s *Sandbox) call(ctx context.Context, of thing, turn turn, decided *atomic.Bool, do func(context.Context) error) error {
	ctx, cancel := deadline.Early(ctx)
	defer cancel()
	done, err := turn(ctx)
	if err != nil {
		return s.late(ctx, "%s: %w", of.what, err)
	}
	answer := make(chan error, 1)
	var givenUp atomic.Bool
	go func() {
		defer func() {
			done()
			if !givenUp.CompareAndSwap(false, true) {
				s.gate.goesOn(-1)
			}
		}()
		answer <- s.safely(of.what, func() error { return do(ctx) })
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
	}
	if decided != nil && !decided.CompareAndSwap(false, true) {
		return <-answer // which comes soon: nothing waits for a disk any more
	}
	select {
	case err := <-answer:
		return err
	default:
		s.gate.goesOn(+1)
		if !givenUp.CompareAndSwap(false, true) { // it has just ended
			s.gate.goesOn(-1)
		}
		return s.late(ctx, "%s: not done in time, a disk may not answer%s: %w", of.what, s.waiting(of.holders), context.Cause(ctx))
	}
}

// late is the answer to who has waited long enough, or was interrupted.
func (s *Sandbox) late(ctx context.Context, format string, args ...any) error {
	if cause := context.Cause(ctx); errors.Is(cause, errRemoved) || errors.Is(cause, errDestroyed) {
		return errkind.New(errkind.FailedPrecondition, format, args...)
	}
	return errkind.New(errkind.DeadlineExceeded, format, args...)
}

// safely turns a panic into an error: nobody above a call's goroutine does.
func (s *Sandbox) safely(what string, do func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Errorf("%s: panic: %v\n%s", what, p, debug.Stack())
			err = errkind.New(errkind.Internal, "%s: the agent has a bug, its log says more", what)
		}
	}()
	return do()
}

// begin has a create be found by interrupt, until end.
func (s *Sandbox) begin(c *create) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creates[c] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.creates, c)
	}
}

// interrupt ends creates, those that wait for their turn among them.
func (s *Sandbox) interrupt(cause error, which func(*create) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.creates {
		if which(c) {
			c.giveUp(cause)
		}
	}
}
