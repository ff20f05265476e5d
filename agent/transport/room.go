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

// patience is how long a connection may take for one frame, or for writing one answer, once others
// need its memory or its place.
const patience = 5 * time.Second

// room is what a listener's connections share: places, memory, and the count of pending answers.
//
//	no place for a new connection   the least recently used connection that has no call or
//	                                is stuck is ended; if there is none, the new one is
//	                                refused
//	no memory for a frame           its connection is not read until there is some; stuck
//	                                connections are ended meanwhile
type room struct {
	pending pending
	ledger  ledger
	memory  memory
	uses    atomic.Uint64  // counts frames, to find the least recently used connection
	order   *arrival.Order // of the calls; nil if they have no order
	routes  []Route        // for calls that Accept's server does not get
	warn    func(format string, args ...any)

	mu    sync.Mutex
	conns map[*conn]bool
}

func newRoom(b bounds) *room {
	r := &room{conns: map[*conn]bool{}, warn: func(string, ...any) {}}
	r.ledger = ledger{bounds: b, held: r.endStuck, kept: r.memory.inUse}
	return r
}

// admit gives a connection a place.
func (r *room) admit(c *conn) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.conns) >= r.ledger.conns {
		oldest := r.oldest(func(c *conn) bool { return !r.pending.has(c) && !c.reading.runs() || c.stuck() })
		if oldest == nil {
			return fmt.Errorf("%d connections are open already, and all have calls in progress", len(r.conns))
		}
		delete(r.conns, oldest)
		oldest.end()
	}
	r.conns[c] = true
	r.ledger.open()
	return nil
}

// oldest returns the least recently used connection for which of returns true. r.mu is held.
func (r *room) oldest(of func(*conn) bool) (oldest *conn) {
	for c := range r.conns {
		if of(c) && (oldest == nil || c.used.Load() < oldest.used.Load()) {
			oldest = c
		}
	}
	return oldest
}

// endStuck ends the connections that keep memory for which others wait.
func (r *room) endStuck() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		if c.stuck() {
			c.end()
		}
	}
}

// left releases a connection's place and memory.
func (r *room) left(c *conn) {
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
	c.tickets.left()
	r.pending.left(c)
	r.ledger.close(&c.account)
}

const (
	// freeAfter is the delay after a flood before its memory is freed, and freeBytes the least
	// amount worth freeing, because a garbage collection takes milliseconds.
	freeAfter = time.Second
	freeBytes = 4 << 20
)

// memory returns the memory of a flood to the guest's kernel. By itself the runtime does so only
// after minutes: an idle agent collects every two minutes, and ttrpc's buffers are in a sync.Pool,
// which needs two collections to free them.
type memory struct {
	peak    atomic.Int64
	freeing atomic.Bool
}

// inUse records how many bytes are in use. The caller must not call it concurrently.
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
