package agentclient

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

const (
	// maxAnswer bounds an answer's frame in bytes, far above the needs of an honest answer. A bound
	// is necessary because a few bytes of an answer can take up much memory when decoded.
	maxAnswer = 256 << 10
	// maxOwed bounds the number of unanswered calls on one connection.
	maxOwed = 1 << 10
	// lateWriteLimit is how long a write may continue after a call's time is up.
	lateWriteLimit = 100 * time.Millisecond
)

// guardedConn carries ttrpc to a guest that may be hostile. A guest that does not read cannot block
// the writer. A frame that is too long, or that answers no call of this client, ends the connection
// before ttrpc's client sees the frame: that client would read a long frame completely, and would
// log a line on the host for each frame without a call. ttrpc still logs a line when an abandoned
// call is answered, at most one for each such call.
type guardedConn struct {
	net.Conn
	limit   time.Duration // of one write
	out, in cursor        // there is one writer and one reader

	mu      sync.Mutex
	owed    map[uint32]struct{} // the streams on which the guest may answer
	sent    uint64              // requests that were sent completely
	writing bool
	overdue int   // calls in progress whose time is up
	refused error // the guest's violation of the protocol
}

func newGuardedConn(conn net.Conn, limit time.Duration) *guardedConn {
	return &guardedConn{Conn: conn, limit: limit, owed: map[uint32]struct{}{}}
}

// Write writes all of p or ends the connection, because nothing can follow a partly written frame.
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

// limitWrites is called when a call's time is up. It limits the current write, whichever call's it
// is, so that the write does not delay the call's end. If the guest reads, the write is over within
// that limit. relax is called at the call's end.
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

// Read reads the guest's bytes. It fails if the guest violates the protocol.
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

// owe records that a request is being sent, so that one answer to it is admitted.
func (g *guardedConn) owe(h ttrpcframe.Header) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.owed) == maxOwed {
		return fmt.Errorf("%d calls were not answered", maxOwed)
	}
	g.owed[h.StreamID] = struct{}{}
	return nil
}

// admit returns an error for a frame that the guest must not send.
func (g *guardedConn) admit(h ttrpcframe.Header) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, owed := g.owed[h.StreamID]
	delete(g.owed, h.StreamID)
	switch {
	case !owed:
		return fmt.Errorf("a frame on stream %d, on which no call waits", h.StreamID)
	case h.Type != ttrpcframe.TypeResponse:
		return fmt.Errorf("a frame of type %d instead of a response", h.Type)
	case h.Length > maxAnswer:
		return fmt.Errorf("a frame of %d bytes, at most %d are valid", h.Length, maxAnswer)
	}
	return nil
}

// requests returns the number of requests that were sent completely.
func (g *guardedConn) requests() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sent
}

// violation returns the guest's violation of the protocol, or nil.
func (g *guardedConn) violation() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refused
}

// cursor tracks frames in a byte stream that arrives in pieces.
type cursor struct {
	header [ttrpcframe.HeaderBytes]byte
	have   int    // bytes of the header
	left   uint32 // bytes of the frame after its header
}

// follow advances by p. It calls begin for each completed header, and returns the number of
// completed frames. It stops at an error from begin.
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
