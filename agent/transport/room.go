package transport

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/directvol/directvol/agent/arrival"
)

// patience is how long a connection may be at one frame, or at writing one answer,
// once others want its memory or its place.
const patience = 5 * time.Second

// room is what a listener's connections share: places, memory, and answers that are
// pending.
//
//	no place for a new connection   the one goes that was used longest ago, of those
//	                                without a call and those that are stuck; where all
//	                                are at work the new one is refused
//	no memory for a frame           its connection is not read until there is some; who
//	                                is stuck meanwhile, is ended
type room struct {
	pending pending
	ledger  ledger
	memory  memory
	uses    atomic.Uint64  // counts frames: who was used last
	order   *arrival.Order // of the calls; nil where they have none
	routes  []Route        // of calls that Accept's server does not get

	mu    sync.Mutex
	conns map[*conn]bool
}

func newRoom(b bounds) *room {
	r := &room{conns: map[*conn]bool{}}
	r.ledger = ledger{bounds: b, held: r.endStuck, kept: r.memory.inUse}
	return r
}

// admit has a connection take a place.
func (r *room) admit(c *conn) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.conns) >= r.ledger.conns {
		oldest := r.oldest(func(c *conn) bool { return !r.pending.has(c) && !c.reading.runs() || c.stuck() })
		if oldest == nil {
			return fmt.Errorf("%d connections are open already, and all of them at work", len(r.conns))
		}
		delete(r.conns, oldest)
		oldest.end()
	}
	r.conns[c] = true
	r.ledger.open()
	return nil
}

// oldest returns the connection that was used longest ago. r.mu is held.
func (r *room) oldest(of func(*conn) bool) (oldest *conn) {
	for c := range r.conns {
		if of(c) && (oldest == nil || c.used.Load() < oldest.used.Load()) {
			oldest = c
		}
	}
	return oldest
}

// endStuck ends the connections that keep memory which others wait for.
func (r *room) endStuck() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		if c.stuck() {
			c.end()
		}
	}
}

// left takes a connection's place and memory back.
func (r *room) left(c *conn) {
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
	c.tickets.left()
	r.pending.left(c)
	r.ledger.close(&c.account)
}

const (
	// freeAfter is how long after a flood its memory is given back, and freeBytes from
	// how much on: a collection takes milliseconds.
	freeAfter = time.Second
	freeBytes = 4 << 20
)

// memory gives back to the guest's kernel what a flood has left. By itself the runtime
// does so after minutes: an agent with nothing to do collects every two, and ttrpc's
// buffers are in a sync.Pool, which takes two collections to let go.
type memory struct {
	peak    atomic.Int64
	freeing atomic.Bool
}

// inUse is told how much is. Its caller sees to it that it is called once at a time.
func (m *memory) inUse(bytes int64) {
	if bytes > m.peak.Load() {
		m.peak.Store(bytes)
	}
	if m.peak.Load()-bytes > freeBytes && bytes < m.peak.Load()/4 && m.freeing.CompareAndSwap(false, true) {
		time.AfterFunc(freeAfter, func() {
			m.peak.Store(0)
			m.freeing.Store(false)
			runtime.GC()
			debug.FreeOSMemory()
		})
	}
}
