package sandbox

import (
	"context"
	"sync"
)

// gate lets many in at a time, or one alone. Who waits for it can give up.
type gate struct {
	mu      sync.Mutex
	inside  int
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

// close waits until the gate is open, closes it, and waits until nobody is inside.
func (g *gate) close(ctx context.Context) error {
	err := g.await(ctx, func() bool {
		was := g.closed
		g.closed = true
		return !was
	})
	if err != nil {
		return err
	}
	if err = g.await(ctx, func() bool { return g.inside == 0 }); err != nil {
		g.open()
	}
	return err
}

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
