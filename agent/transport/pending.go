package transport

import (
	"context"
	"sync"
)

// pending counts the requests that were read and not yet answered on their connection, by a server
// or in place. ttrpc regards a connection as idle until it has written its first answer, and would
// close it.
type pending struct {
	mu       sync.Mutex
	requests int
	none     chan struct{} // closed when the count is zero; nil if nobody waits
}

// took notes that a request of c was read; answered notes that a response to a request was written.
func (o *pending) took(c *conn)     { o.change(c, 1) }
func (o *pending) answered(c *conn) { o.change(c, -1) }

// left notes that c is closed: no answer is pending for it any more.
func (o *pending) left(c *conn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.settle(-c.pending)
	c.pending = 0
}

// has reports whether an answer to c is pending.
func (o *pending) has(c *conn) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return c.pending > 0
}

func (o *pending) change(c *conn, by int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if c.pending+by < 0 {
		return // a response without a request
	}
	c.pending += by
	o.settle(by)
}

// settle changes the total. o.mu is held.
func (o *pending) settle(by int) {
	o.requests += by
	if o.requests == 0 && o.none != nil {
		close(o.none)
		o.none = nil
	}
}

// await returns when no answer is pending, or with ctx's error.
func (o *pending) await(ctx context.Context) error {
	o.mu.Lock()
	if o.requests == 0 {
		o.mu.Unlock()
		return nil
	}
	if o.none == nil {
		o.none = make(chan struct{})
	}
	none := o.none
	o.mu.Unlock()
	select {
	case <-none:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
