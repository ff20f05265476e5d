package sandbox

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/directvol/directvol/agent/arrival"
)

// gate lets many calls in at a time, or one alone. A call can give up waiting for it.
type gate struct {
	mu      sync.Mutex
	inside  int
	late    int // of those inside, how many have already answered their caller with an error
	closed  bool
	changed chan struct{} // closed and replaced when one of the above changes
}

func newGate() gate { return gate{changed: make(chan struct{})} }

// enter waits until the gate is open.
func (g *gate) enter(ctx context.Context) (leave func(), err error) {
	err = g.await(ctx, func() bool {
		if !g.closed {
			g.inside++
		}
		return !g.closed
	})
	return func() { g.change(func() { g.inside-- }) }, err
}

// errGoesOn is why a gate cannot be closed: a call inside may stay there forever.
var errGoesOn = errors.New("an abandoned call has not ended")

// lateLimit is how long close waits for late calls: a late call that waits for no disk is undone at
// once.
const lateLimit = 3 * time.Second

// close waits until the gate is open, closes it, and waits until no call is inside. If a call
// inside is late, close waits for lateLimit only.
func (g *gate) close(ctx context.Context) error {
	err := g.await(ctx, func() bool {
		was := g.closed
		g.closed = true
		return !was
	})
	if err != nil {
		return err
	}
	arrival.Joined(ctx)
	soon, cancel := context.WithTimeout(ctx, lateLimit)
	defer cancel()
	none := func() bool { return g.inside == 0 }
	if err = g.await(soon, none); err != nil && ctx.Err() == nil {
		late := false
		err = g.await(ctx, func() bool { late = g.late > 0; return late || none() })
		if late {
			err = errGoesOn
		}
	}
	if err != nil {
		g.open()
	}
	return err
}

// goesOn changes the number of late calls.
func (g *gate) goesOn(by int) { g.change(func() { g.late += by }) }

func (g *gate) open() { g.change(func() { g.closed = false }) }

// await waits until is returns true. It calls is under g.mu.
func (g *gate) await(ctx context.Context, is func() bool) error {
	for {
		g.mu.Lock()
		yes, changed := is(), g.changed
		g.mu.Unlock()
		if yes {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (g *gate) change(do func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	do()
	close(g.changed)
	g.changed = make(chan struct{})
}
