// Package turns lets calls that concern one thing go one at a time.
package turns

import (
	"context"
	"sync"
)

// Turns lets the calls that concern one key go one at a time, and those of others
// pass: a call can take as long as a disk wants. The zero value is ready.
type Turns struct {
	mu     sync.Mutex
	queues map[string]*queue
}

type queue struct {
	turn  chan struct{} // holds a token while somebody's turn lasts
	users int           // in turn or waiting; Turns.mu guards it
}

// Take waits for the turn at key until ctx ends; the caller ends it by calling
// done.
func (t *Turns) Take(ctx context.Context, key string) (done func(), err error) {
	q := t.join(key)
	select {
	case q.turn <- struct{}{}: // also where there is no time to wait
		return func() { <-q.turn; t.leave(key, q) }, nil
	default:
	}
	select {
	case q.turn <- struct{}{}:
		return func() { <-q.turn; t.leave(key, q) }, nil
	case <-ctx.Done():
		t.leave(key, q)
		return nil, ctx.Err()
	}
}

func (t *Turns) join(key string) *queue {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queues == nil {
		t.queues = map[string]*queue{}
	}
	q := t.queues[key]
	if q == nil {
		q = &queue{turn: make(chan struct{}, 1)}
		t.queues[key] = q
	}
	q.users++
	return q
}

func (t *Turns) leave(key string, q *queue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.users--; q.users == 0 {
		delete(t.queues, key)
	}
}
