package transport

import (
	"context"
	"sync"
)

// owed counts the requests that were read and are not answered on their connection, by the
// server or where they were read. ttrpc takes a connection for idle before it has
// written its first answer, and would close it.
type owed struct {
	mu       sync.Mutex
	requests int
	none     chan struct{} // closed when there are none; nil where nobody waits
}

// took notes that a request of c goes up or is to be answered where it was read, and answered
// that a response to one was written.
func (o *owed) took(c *conn)     { o.change(c, 1) }
func (o *owed) answered(c *conn) { o.change(c, -1) }

// left notes that c is closed: nothing can be owed to it any more.
func (o *owed) left(c *conn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.settle(-c.owes)
	c.owes = 0
}

// owes reports whether an answer to c is owed.
func (o *owed) owes(c *conn) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return c.owes > 0
}

func (o *owed) change(c *conn, by int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if c.owes+by < 0 {
		return // a response that nobody has asked for
	}
	c.owes += by
	o.settle(by)
}

// settle changes the sum. o.mu is held.
func (o *owed) settle(by int) {
	o.requests += by
	if o.requests == 0 && o.none != nil {
		close(o.none)
		o.none = nil
	}
}

// await returns when nothing is owed, or with ctx's error.
func (o *owed) await(ctx context.Context) error {
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
