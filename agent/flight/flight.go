// Package flight asks questions that a disk may not answer: if the disk hangs, only one thread
// waits for it, however often the question is asked.
package flight

import (
	"context"
	"sync"
)

// Flights are the questions in progress, by key. The zero value is ready.
type Flights[K comparable, V any] struct {
	mu    sync.Mutex
	under map[K]*flight[V]
}

type flight[V any] struct {
	done   chan struct{} // closed when answer is set
	answer V
}

// Anew is Ask with an answer that was begun after the call: it asks a second time if it has joined
// another caller's question.
func (f *Flights[K, V]) Anew(ctx context.Context, key K, ask func() V) (answer V, ok bool) {
	own := false // this call's ask has run; valid once there is an answer
	if answer, ok = f.Ask(ctx, key, func() V { own = true; return ask() }); !ok || own {
		return answer, ok
	}
	return f.Ask(ctx, key, ask)
}

// Ask returns the result of ask. If another caller has already asked the question, Ask returns that
// answer, which may have begun before this call. If ctx ends first, ok is false and ask goes on.
// ask must not panic.
func (f *Flights[K, V]) Ask(ctx context.Context, key K, ask func() V) (answer V, ok bool) {
	f.mu.Lock()
	one := f.under[key]
	if one == nil {
		one = &flight[V]{done: make(chan struct{})}
		if f.under == nil {
			f.under = map[K]*flight[V]{}
		}
		f.under[key] = one
		go func() {
			one.answer = ask()
			f.mu.Lock()
			delete(f.under, key)
			f.mu.Unlock()
			close(one.done)
		}()
	}
	f.mu.Unlock()
	select {
	case <-one.done:
		return one.answer, true
	case <-ctx.Done():
		var none V
		return none, false
	}
}
