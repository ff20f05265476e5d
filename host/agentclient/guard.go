package agentclient

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

const (
	// maxAnswer bounds an answer's frame, in bytes, far above what an honest one needs: a few bytes of it can be many in memory.
	maxAnswer = 256 << 10
	// maxOwed bounds the calls that a guest has left unanswered on one connection.
	maxOwed = 1 << 10
	// lateWriteLimit is how long a write may still take when a call's time is up.
	lateWriteLimit = 100 * time.Millisecond
)

// guardedConn carries ttrpc to a guest that may be hostile. A guest that does not read does not hold the writer up. A frame that answers no call of
// ours, or is too long, ends the connection before ttrpc's client sees it: that client would read all of a long frame, and write a line to the host's
// log for each frame that answers nothing. What remains is a line for an answer to a call that was given up, one at most for each.
type guardedConn struct {
	net.Conn
	limit   time.Duration // of a write
	out, in cursor        // there is one writer and one reader

	mu      sync.Mutex
	owed    map[uint32]struct{} // the streams that a guest may answer on
	sent    uint64              // requests that went out to their last byte
	writing bool
	overdue int   // calls under way whose time is up
	refused error // what the guest did that it must not do
}

func newGuardedConn(conn net.Conn, limit time.Duration) *guardedConn {
	return &guardedConn{Conn: conn, limit: limit, owed: map[uint32]struct{}{}}
}

// Write writes all of p, or ends the connection: what was written by halves can be followed by nothing.
func (g *guardedConn) Write(p []byte) (int, error) {
	whole, err := g.out.follow(p, g.owe)
	if err == nil {
		err = g.setWriting()
	}
	n := 0
	if err == nil {
		n, err = g.Conn.Write(p)
	}
	g.mu.Lock()
	g.writing = false
	if err == nil {
		g.sent += uint64(whole)
	}
	g.mu.Unlock()
	if err != nil {
		g.Close()
	}
	return n, err
}

func (g *guardedConn) setWriting() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writing = true
	limit := g.limit
	if g.overdue > 0 {
		limit = min(limit, lateWriteLimit)
	}
	return g.SetWriteDeadline(time.Now().Add(limit))
}

// hurry is told of a call whose time is up: a write that does not end shall not hold it, whichever call's write it is. One that the guest reads is over
// by then. The call's end is told by relax.
func (g *guardedConn) limitWrites() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.overdue++
	if g.writing {
		g.SetWriteDeadline(time.Now().Add(lateWriteLimit))
	}
}

func (g *guardedConn) relax() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.overdue--
}

// Read reads what the guest sends, and fails where it breaks the rules.
func (g *guardedConn) Read(p []byte) (int, error) {
	n, err := g.Conn.Read(p)
	if _, refused := g.in.follow(p[:n], g.admit); refused != nil {
		g.mu.Lock()
		g.refused = refused
		g.mu.Unlock()
		g.Close()
		return 0, refused
	}
	return n, err
}

// owe takes down that a request goes out. An answer to it is admitted from now on, once.
func (g *guardedConn) owe(h ttrpcframe.Header) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.owed) == maxOwed {
		return fmt.Errorf("%d calls were not answered", maxOwed)
	}
	g.owed[h.StreamID] = struct{}{}
	return nil
}

// admit says whether a frame of the guest's may come in.
func (g *guardedConn) admit(h ttrpcframe.Header) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, owed := g.owed[h.StreamID]
	delete(g.owed, h.StreamID)
	switch {
	case !owed:
		return fmt.Errorf("a frame on stream %d, where no call waits", h.StreamID)
	case h.Type != ttrpcframe.TypeResponse:
		return fmt.Errorf("a frame of type %d, where a response is due", h.Type)
	case h.Length > maxAnswer:
		return fmt.Errorf("a frame of %d bytes, at most %d make sense", h.Length, maxAnswer)
	}
	return nil
}

// requests is the number of requests that went out.
func (g *guardedConn) requests() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sent
}

// violation is what the guest did that it must not do, nil for most.
func (g *guardedConn) violation() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refused
}

// cursor follows the frames in a stream of bytes that comes in pieces.
type cursor struct {
	header [ttrpcframe.HeaderBytes]byte
	have   int    // bytes of header
	left   uint32 // bytes of the frame behind its header
}

// follow goes on by p. It calls begin for each header that is complete then, and returns how many frames are. begin's error ends it.
func (c *cursor) follow(p []byte, begin func(ttrpcframe.Header) error) (whole int, err error) {
	for len(p) > 0 {
		if c.have < len(c.header) {
			n := copy(c.header[c.have:], p)
			c.have, p = c.have+n, p[n:]
			if c.have < len(c.header) {
				return whole, nil
			}
			header := ttrpcframe.ParseHeader(c.header[:])
			if err := begin(header); err != nil {
				return whole, err
			}
			c.left = header.Length
		}
		n := min(uint64(c.left), uint64(len(p)))
		c.left, p = c.left-uint32(n), p[n:]
		if c.left == 0 {
			c.have = 0
			whole++
		}
	}
	return whole, nil
}
