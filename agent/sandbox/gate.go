package sandbox

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/directvol/directvol/agent/arrival"
)

// gate lets many in at a time, or one alone. Who waits for it can give up.
type gate struct {
	mu      sync.Mutex
	inside  int
	late    int // of those inside, whose callers were told that they are not done
	closed  bool
	changed chan struct{} // closed, and replaced, when one of the above has
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

// errGoesOn is why a gate is not closed: who is inside may be there for ever.
var errGoesOn = errors.New("a call that was given up has not ended")

// lateLimit is how long those who are late are waited for: what waits for no disk is
// undone at once.
const lateLimit = 3 * time.Second

// close waits until the gate is open, closes it, and waits until nobody is inside: where
// somebody is late, for a moment only.
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

// goesOn counts who is late.
func (g *gate) goesOn(by int) { g.change(func() { g.late += by }) }

func (g *gate) open() { g.change(func() { g.closed = false }) }

// await waits until is says yes, under g.mu.
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
