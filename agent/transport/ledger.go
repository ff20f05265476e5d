package transport

import (
	"slices"
	"sync"
	"time"
)

// waitLook is how often it is looked at whether somebody keeps others waiting.
const waitLook = time.Second

// ledger lends memory for calls to connections: before a frame is read, until its
// answer is written. Who asks for more than there is waits, and whoever wants least
// is served first, so that nobody waits for a large frame to get a small one.
type ledger struct {
	bounds
	held func()      // called every waitLook while memory is waited for that others have
	kept func(int64) // called with what is in use, whenever that changes

	mu      sync.Mutex
	inUse   int64 // what connections have of their own included
	lent    int64
	waiting []*waiter // whoever wants least first
	looking bool
}

// account is what one connection has. Its ledger's mu guards it.
type account struct {
	inUse  int64
	calls  []charge
	closed bool
}

type charge struct {
	stream uint32
	bytes  int64
}

type waiter struct {
	*account
	charge
	served chan struct{}
}

// borrowed is how much of what an account has in use is not its own.
func (a *account) borrowed(more int64) int64 { return max(0, a.inUse+more-ownBytes) }

// take charges a call, and waits until there is memory for it. false means that
// the connection is over.
func (l *ledger) take(a *account, stream uint32, bytes int64, over <-chan struct{}) bool {
	l.mu.Lock()
	w := &waiter{a, charge{stream, bytes}, make(chan struct{})}
	if !l.serve(w) {
		at, _ := slices.BinarySearchFunc(l.waiting, bytes+1, func(w *waiter, bytes int64) int { return int(w.bytes - bytes) })
		l.waiting = slices.Insert(l.waiting, at, w)
		l.look()
	}
	l.mu.Unlock()
	select {
	case <-w.served:
		return true
	case <-over:
		return false
	}
}

// serve charges a call if there is memory for it. l.mu is held.
func (l *ledger) serve(w *waiter) bool {
	more := w.borrowed(w.bytes) - w.borrowed(0)
	if w.closed || !l.mayBorrow(w) || l.lent+more > l.bounds.lent {
		return false
	}
	l.lent += more
	w.calls = append(w.calls, w.charge)
	l.use(w.account, w.bytes)
	close(w.served)
	return true
}

// mayBorrow tells whether the account's own bound allows it. l.mu is held.
func (l *ledger) mayBorrow(w *waiter) bool { return w.borrowed(w.bytes) <= l.lentToOne }

func (l *ledger) use(a *account, bytes int64) {
	a.inUse += bytes
	l.inUse += bytes
	l.kept(l.inUse)
}

// give ends the charge of a stream: the last one, where there are several.
func (l *ledger) give(a *account, stream uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, c := range slices.Backward(a.calls) {
		if c.stream == stream {
			a.calls = slices.Delete(a.calls, i, i+1)
			l.free(a, c.bytes)
			return
		}
	}
}

// open counts a connection that has begun.
func (l *ledger) open() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inUse += heapBytes
	l.kept(l.inUse)
}

// close ends all charges of a connection that is over.
func (l *ledger) close(a *account) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inUse -= heapBytes
	a.closed, a.calls = true, nil
	l.waiting = slices.DeleteFunc(l.waiting, func(w *waiter) bool { return w.account == a })
	l.free(a, a.inUse)
}

// free takes memory back and serves who waits for it. l.mu is held.
func (l *ledger) free(a *account, bytes int64) {
	l.lent -= a.borrowed(0) - a.borrowed(-bytes)
	l.use(a, -bytes)
	l.waiting = slices.DeleteFunc(l.waiting, l.serve)
}

// look begins to call held, until nobody waits. l.mu is held.
func (l *ledger) look() {
	if l.looking {
		return
	}
	l.looking = true
	time.AfterFunc(waitLook, func() {
		l.mu.Lock()
		forOthers := slices.ContainsFunc(l.waiting, l.mayBorrow)
		l.mu.Unlock()
		if forOthers {
			l.held()
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.looking = false
		if len(l.waiting) > 0 {
			l.look()
		}
	})
}
