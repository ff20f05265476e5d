package vhostvsock

import (
	"time"

	"golang.org/x/sys/unix"
)

// bufAlloc limits how many bytes from the guest one connection buffers for a client that does not
// read, in addition to the client's socket buffer. The guest receives it as buf_alloc. It is the
// size of one of Linux's largest packets.
const bufAlloc = maxPacketPayload

// creditStep is how many more bytes the client must read before the guest gets new credit, with the
// next packet to it.
//
// Smaller steps are slow with Linux guests. A guest receives in buffers of 4 KiB, and with many
// streams on one processor its kernel runs a stream's reader after each buffer. An echo server with
// permanent credit then answers each 4 KiB separately, with a packet, a credit update and a thread
// switch. A server that waits for a large step of credit finds as much data to read when it
// continues. TCP has the same rule (RFC 1122, section 4.2.3.3).
const creditStep = bufAlloc / 2

type connState uint8

const (
	greeting    connState = iota // the client has not sent CONNECT yet; the guest knows nothing
	connecting                   // the guest has not answered yet, or was not asked yet
	established                  // bytes flow both ways
	draining                     // ended for the guest, except for a reset still to be sent; the client still gets what is buffered
)

// debt is a set of packets, apart from data, that a connection still has to send to the guest.
type debt uint8

const (
	oweReset debt = 1 << iota
	oweRequest
	oweShutdown
	oweCreditUpdate
	oweCreditRequest
)

// connection is one client's stream into the guest.
type connection struct {
	fd        int // the client's socket; -1 when closed
	hostPort  uint32
	guestPort uint32
	state     connState
	debts     debt
	moved     progress      // the progress at movedAt
	movedAt   time.Duration // when the connection last made progress or was not stuck
	queued    bool          // in mux.ready

	// Towards the guest.
	readable  bool   // the socket may have data
	ended     bool   // the client sends no more
	gone      bool   // the client receives no more either
	refused   bool   // the guest receives no more
	peerAlloc uint32 // the guest's buf_alloc; for credit see virtio 1.2, section 5.10.6.3
	peerFwd   uint32 // bytes that the guest's reader has taken, modulo 2^32
	sent      uint32 // bytes sent to the guest, modulo 2^32
	asked     bool   // the guest was asked for credit since credit ran out

	// From the guest.
	finished bool   // the guest sends no more
	pending  buffer // bytes that the client has not taken yet
	fwd      uint32 // bytes that the client has taken, modulo 2^32
	toldFwd  uint32 // the value of fwd that the guest was told
}

// credit returns how many bytes the guest has room for. If the guest reduces its promise below what
// is in flight, the result is 0 and does not wrap around.
func (c *connection) credit() int {
	inFlight := c.sent - c.peerFwd
	if inFlight >= c.peerAlloc {
		return 0
	}
	return int(c.peerAlloc - inFlight)
}

// mayRead reports whether bytes from the client can be sent to the guest now.
func (c *connection) mayRead() bool {
	return c.state == established && c.readable && !c.ended && !c.refused && c.credit() > 0
}

// hasPacket reports whether there may be a packet for the guest.
func (c *connection) hasPacket() bool { return c.debts != 0 || c.mayRead() }

// known reports whether packets from the guest may refer to this connection.
func (c *connection) known() bool { return c.state == connecting || c.state == established }

// taken counts bytes that the client's socket accepted.
func (c *connection) taken(n int) {
	c.fwd += uint32(n)
	if c.state == established && c.fwd-c.toldFwd >= creditStep {
		c.debts |= oweCreditUpdate
	}
}

// buffer is a queue of bytes. An empty buffer uses no memory.
type buffer struct {
	bytes []byte
	start int
}

func (b *buffer) len() int { return len(b.bytes) - b.start }

// push appends a copy of s.
func (b *buffer) push(s segments) {
	if b.start > 0 && len(b.bytes)+s.size() > cap(b.bytes) {
		b.bytes = b.bytes[:copy(b.bytes, b.bytes[b.start:])]
		b.start = 0
	}
	for _, p := range s {
		b.bytes = append(b.bytes, p...)
	}
}

// pop removes n bytes from the front.
func (b *buffer) pop(n int) {
	b.start += n
	if b.len() == 0 {
		*b = buffer{}
	}
}

// peek returns the queued bytes. The slice is valid until the next push or pop.
func (b *buffer) peek() []byte { return b.bytes[b.start:] }

// retryable reports whether a non-blocking call should be repeated later.
func retryable(err error) bool { return err == unix.EAGAIN || err == unix.EINTR }
