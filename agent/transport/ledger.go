package transport

import (
	"slices"
	"sync"
	"time"
)

// waitLook is how often the ledger checks whether a connection keeps others waiting.
const waitLook = time.Second

// ledger lends memory for calls to connections, from before a frame is read until its answer is
// written. A request for more than is free waits, and the smallest request is served first, so that
// a small frame never waits for memory behind a large one.
type ledger struct {
	bounds
	held func()      // called every waitLook while a connection waits for memory that others have
	kept func(int64) // called with the bytes in use whenever they change

	mu      sync.Mutex
	inUse   int64 // including what connections have of their own
	lent    int64
	waiting []*waiter // the smallest request first
	looking bool
}

// account is what one connection has. The ledger's mu guards it.
type account struct {
	inUse  int64
	calls  []charge
	closed bool
}

type charge struct {
	stream uint32 // the call's number
	bytes  int64
}

type waiter struct {
	*account
	charge
	served chan struct{}
}

// borrowed returns how much an account with more bytes in use has beyond its own share.
func (a *account) borrowed(more int64) int64 { return max(0, a.inUse+more-ownBytes) }

// take charges a call, and waits until there is memory for it. It returns false if the connection
// is over.
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

// mayBorrow reports whether the account's own bound allows the charge. l.mu is held.
func (l *ledger) mayBorrow(w *waiter) bool { return w.borrowed(w.bytes) <= l.lentToOne }

func (l *ledger) use(a *account, bytes int64) {
	a.inUse += bytes
	l.inUse += bytes
	l.kept(l.inUse)
}

// give ends the charge of a call, which is known by the number that numbering gave it.
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

// open counts a connection that was opened.
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

// free returns memory and serves waiting calls. l.mu is held.
func (l *ledger) free(a *account, bytes int64) {
	l.lent -= a.borrowed(0) - a.borrowed(-bytes)
	l.use(a, -bytes)
	l.waiting = slices.DeleteFunc(l.waiting, l.serve)
}

// look starts to call held every waitLook, until no call waits. l.mu is held.
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
