// Package turns serializes calls that concern the same thing.
package turns

import (
	"context"
	"slices"
	"sync"
)

// Turns serializes the calls for one key in the order in which they joined. Calls for other keys do
// not wait, because a call may take as long as a disk does. The zero value is ready.
type Turns struct {
	mu     sync.Mutex
	queues map[string][]*Place // the first place has the turn
}

// Place is a place in the queue of a key, until Leave.
type Place struct {
	turns *Turns
	key   string
	first chan struct{} // closed when the place has the turn
}

// Take waits for the turn at key until ctx ends. The caller ends its turn by calling done.
func (t *Turns) Take(ctx context.Context, key string) (done func(), err error) {
	p := t.Join(key)
	if err := p.Await(ctx); err != nil {
		p.Leave()
		return nil, err
	}
	return p.Leave, nil
}

// Join takes the last place at key without blocking. The caller ends it by Leave.
func (t *Turns) Join(key string) *Place {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queues == nil {
		t.queues = map[string][]*Place{}
	}
	p := &Place{turns: t, key: key, first: make(chan struct{})}
	if t.queues[key] = append(t.queues[key], p); len(t.queues[key]) == 1 {
		close(p.first)
	}
	return p
}

// Await waits until the place has the turn, or returns ctx's error.
func (p *Place) Await(ctx context.Context) error {
	select {
	case <-p.first: // succeeds even if there is no time to wait
		return nil
	default:
	}
	select {
	case <-p.first:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-p.first: // it came before this goroutine ran again
		return nil
	default:
		return ctx.Err()
	}
}

// Leave gives up the place and passes on the turn if the place had it. Leave may be called again.
func (p *Place) Leave() {
	t := p.turns
	t.mu.Lock()
	defer t.mu.Unlock()
	queue := t.queues[p.key]
	at := slices.Index(queue, p)
	if at < 0 {
		return
	}
	queue = slices.Delete(queue, at, at+1)
	switch {
	case len(queue) == 0:
		delete(t.queues, p.key)
		return
	case at == 0:
		close(queue[0].first)
	}
	t.queues[p.key] = queue
}
