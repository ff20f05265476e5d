// Package sandbox implements the sandbox and its containers. Each of them runs one call at a time.
// A call goes on after its caller's deadline: the next call of the same container waits until all
// that the earlier call did is complete or undone. So no call ever finds something that another
// call is about to take away.
//
//	call               beside a create of   beside a remove of  beside a destroy
//	                   the same             the same
//	create container   waits for it         waits for it        waits for it
//	remove container   ends it, waits       waits for it        waits for it
//	create sandbox     waits for it         has no remove       waits for it
//	destroy            ends any, waits      waits for any       waits for it
//
// Calls run in the order in which they arrived (agent/arrival), even if they wait.
//
// Each call waits until its caller's deadline, and its error then names what it waited for. A
// destroy does not wait beside a call whose caller has given up, for instance because of a disk
// that hangs: the destroy would block every other container, too.
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

// Storages are the methods of storage.Table that a sandbox needs; storage.Table documents them.
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

// Sandbox is a sandbox with its containers.
type Sandbox struct {
	log      *logrus.Entry
	storages Storages
	turns    turns.Turns // by container; storage.Sandbox is the key of the sandbox itself
	gate     gate

	Guest guest.Guest // the guest that the sandbox is in

	// Sync, if set, makes all disks take all earlier writes, including disks without a storage.
	// Destroy calls it before it changes anything. Its error names the disk that does not answer.
	Sync func(context.Context) error

	mu      sync.Mutex
	creates map[*create]bool // in progress, or waiting for their turn
}

// create is a create call that can be interrupted.
type create struct {
	id     string
	giveUp context.CancelCauseFunc
}

// New returns a sandbox whose containers hold storages.
func New(log *logrus.Entry, storages Storages) *Sandbox {
	return &Sandbox{log: log, storages: storages, gate: newGate(), creates: map[*create]bool{}}
}

// step is a part of a create that runs before the storages are held. undo, which may be nil, is
// called if a later part fails.
type step func(context.Context) (undo func() error, err error)

// Settings are the guest's settings for a sandbox; package guest documents the valid values.
type Settings struct {
	Modules  []*agentpb.KernelModule
	Resolver []string // lines of resolv.conf(5)
	Hostname string
}

// Create creates the sandbox, and may do so again after Destroy: it applies the guest's settings
// and holds the sandbox's own storages. If it fails, the sandbox is as it was, except that modules
// stay loaded. After a Destroy, Create runs alone.
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

// errAgain means that the sandbox was destroyed, and that Create must run again, alone.
var errAgain = errors.New("after DestroySandbox a sandbox is created only when no other call runs")

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

// hold takes the steps and holds storages. If it fails, it undoes the steps.
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

// releaseLimit is the deadline of a call that unmounts if its caller sets none. Kata's clients and
// ours wait for 10 s or more.
const releaseLimit = 8 * time.Second

// limited returns a context that ends at the caller's deadline, or after releaseLimit.
func limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, releaseLimit)
}

// Reasons for interrupting a create whose caller is still waiting.
var (
	errRemoved   = errors.New("it was removed while it was created")
	errDestroyed = errors.New("DestroySandbox was called while it was created")
)

// create runs do in its turn, until the caller's deadline or until the create is interrupted. do
// must call agreed before it holds anything for good.
func (s *Sandbox) create(ctx context.Context, what, id string, turn turn, do func(ctx context.Context, agreed func() bool) error) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	defer s.begin(&create{id, giveUp})()
	var decided atomic.Bool // set by do when it succeeds, or by the caller when it gives up
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

// decides returns the function agreed, which a call calls at its end. It returns true if the caller
// is still waiting; the caller then gets the call's answer.
func decides(ctx context.Context, decided *atomic.Bool) func() bool {
	return func() bool { return ctx.Err() == nil && decided.CompareAndSwap(false, true) }
}

// Destroy unmounts everything, and refuses containers until Create. If it fails, the sandbox and
// its containers are as they were.
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

// UnmountEach unmounts every storage that can be unmounted, for the shutdown of the guest.
func (s *Sandbox) UnmountEach(ctx context.Context) error {
	return s.call(ctx, thing{what: "shutdown of the guest"}, func(context.Context) (func(), error) { return func() {}, nil }, nil, s.storages.UnmountEach)
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

// turn waits until a call may run; done ends the call's turn. The error names what turn has waited
// for.
type turn func(context.Context) (done func(), err error)

// inTurn waits for the turn of a container or of the sandbox, and for the end of a Destroy.
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
			return nil, fmt.Errorf("another call for it has not ended, a disk may not answer%s: %w", s.waiting(holdersOf(id)), context.Cause(ctx))
		}
		return func() { place.Leave(); leave() }, nil
	}
}

// alone waits until no call is in progress.
func (s *Sandbox) alone(ctx context.Context) (func(), error) {
	if err := s.gate.close(ctx); err != nil {
		return nil, fmt.Errorf("calls for its containers have not ended, a disk may not answer%s: %w", s.waiting(nil), err)
	}
	return s.gate.open, nil
}

// thing is what a call is about, and the holders whose disks it may wait for; no holders means all.
type thing struct {
	what    string
	holders []string
}

func containerOf(id string) thing { return thing{"container " + id, holdersOf(id)} }

// holdersOf returns the holders whose storages a container's calls mount or release: the sandbox
// holds shared storages.
func holdersOf(id string) []string { return []string{id, storage.Sandbox} }

// waiting lists, in brackets, the disks that calls may be waiting for.
func (s *Sandbox) waiting(holders []string) string {
	all := s.storages.Waiting(holders...)
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, ", ") + ")"
}

// call waits for its turn and runs do in it; the turn ends when do returns. The caller gets an
// answer before its deadline, and do may go on after that. If do has already decided that it
// succeeds, the caller waits for do's answer.
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
		return <-answer // comes soon, because do waits for no disk any more
	}
	select {
	case err := <-answer:
		return err
	default:
		s.gate.goesOn(+1)
		if !givenUp.CompareAndSwap(false, true) { // do has just ended
			s.gate.goesOn(-1)
		}
		return s.late(ctx, "%s: not done in time, a disk may not answer%s: %w", of.what, s.waiting(of.holders), context.Cause(ctx))
	}
}

// late returns the error for a caller whose time is over, or whose call was interrupted.
func (s *Sandbox) late(ctx context.Context, format string, args ...any) error {
	if cause := context.Cause(ctx); errors.Is(cause, errRemoved) || errors.Is(cause, errDestroyed) {
		return errkind.New(errkind.FailedPrecondition, format, args...)
	}
	return errkind.New(errkind.DeadlineExceeded, format, args...)
}

// safely turns a panic into an error, because do runs in a goroutine of its own.
func (s *Sandbox) safely(what string, do func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Errorf("%s: panic: %v\n%s", what, p, debug.Stack())
			err = errkind.New(errkind.Internal, "%s: the agent has a bug, its log says more", what)
		}
	}()
	return do()
}

// begin makes a create visible to interrupt, until end is called.
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

// interrupt interrupts the creates that match, including those that wait for their turn.
func (s *Sandbox) interrupt(cause error, which func(*create) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.creates {
		if which(c) {
			c.giveUp(cause)
		}
	}
}
