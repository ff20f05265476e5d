package agentclient

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

const (
	// maxAnswer bounds an answer's frame in bytes. The longest honest answer is a list of volumes,
	// of some hundred bytes each. Decoded, an answer takes up to four times as much
	// (gogocodec.MaxGrowth).
	maxAnswer = 1 << 20
	// maxUnread bounds the messages of a stream that have arrived and that the caller has not taken
	// yet. ttrpc's client keeps 64, and drops the next one after a second.
	maxUnread = 16
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
//
// A stream has a connection of its own: frames of data are admitted there alone. It is read no
// faster than the caller takes the messages, so that the agent notices a slow caller, and ttrpc's
// client loses no message.
type guardedConn struct {
	net.Conn
	limit   time.Duration // of one write
	out, in cursor        // there is one writer and one reader
	waited  bool          // the reader has room for the next message of the stream

	mu      sync.Mutex
	owed    map[uint32]struct{} // the streams on which the guest may answer
	sent    uint64              // requests that were sent completely
	writing bool
	overdue int   // calls in progress whose time is up
	refused error // the guest's violation of the protocol
	replied bool  // a response has arrived

	unread chan struct{} // has a value for each message that the caller has not taken; nil if there is no stream
	closed chan struct{}
	close  sync.Once
}

func newGuardedConn(conn net.Conn, limit time.Duration) *guardedConn {
	return &guardedConn{Conn: conn, limit: limit, owed: map[uint32]struct{}{}, closed: make(chan struct{})}
}

// newStreamConn is newGuardedConn for one call that is answered with a stream. The caller calls
// took after each message.
func newStreamConn(conn net.Conn, limit time.Duration) *guardedConn {
	g := newGuardedConn(conn, limit)
	g.unread = make(chan struct{}, maxUnread)
	return g
}

// took makes room for one more message of the stream.
func (g *guardedConn) took() { <-g.unread }

// Close closes the connection. A Read that waits for the caller ends.
func (g *guardedConn) Close() error {
	g.close.Do(func() { close(g.closed) })
	return g.Conn.Close()
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
	if g.unread != nil && len(p) > 0 {
		if p = p[:min(len(p), g.in.rest())]; g.in.have == 0 && !g.awaitRoom() {
			return 0, net.ErrClosed
		}
	}
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

// awaitRoom waits until one more message of the stream may be read. It returns false if the
// connection is closed first.
func (g *guardedConn) awaitRoom() bool {
	if g.waited {
		return true
	}
	select {
	case g.unread <- struct{}{}:
		g.waited = true
		return true
	case <-g.closed:
		return false
	}
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
	if h.EndsCall() {
		delete(g.owed, h.StreamID)
	}
	g.replied = g.replied || h.Type == ttrpcframe.TypeResponse
	g.waited = false
	isData := g.unread != nil && h.Type == ttrpcframe.TypeData
	switch {
	case !owed:
		return fmt.Errorf("a frame on stream %d, on which no call waits", h.StreamID)
	case h.Type != ttrpcframe.TypeResponse && !isData:
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

// hasReplied reports whether the guest has sent a response.
func (g *guardedConn) hasReplied() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.replied
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

// rest returns how many bytes the header or the frame lacks.
func (c *cursor) rest() int {
	if c.have < len(c.header) {
		return len(c.header) - c.have
	}
	return int(c.left)
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
