// Package flight asks a question that a disk may not answer: while it hangs, one thread
// waits for it, however often the question is asked.
package flight

import (
	"context"
	"sync"
)

// Flights are questions under way, by what they are about. The zero value is ready.
type Flights[K comparable, V any] struct {
	mu    sync.Mutex
	under map[K]*flight[V]
}

type flight[V any] struct {
	done   chan struct{} // closed when answer is there
	answer V
}

// Anew is Ask, of an answer that was begun since it was called: it asks once more where
// it has joined another caller.
func (f *Flights[K, V]) Anew(ctx context.Context, key K, ask func() V) (answer V, ok bool) {
	own := false // its ask has run, which is known when there is an answer
	if answer, ok = f.Ask(ctx, key, func() V { own = true; return ask() }); !ok || own {
		return answer, ok
	}
	return f.Ask(ctx, key, ask)
}

// Ask returns what ask answers, which another caller may have begun to ask: it is as new
// as that. When ctx ends first, ok is false, and ask goes on. It must not panic.
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
