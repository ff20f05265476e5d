package vhostvsock

import (
	"time"

	"golang.org/x/sys/unix"
)

// bufAlloc is how much of one connection's bytes from the guest we keep for a
// client that does not read, beside what its socket holds. The guest knows it as
// our buf_alloc. It is one of Linux's largest packets.
const bufAlloc = maxPacketPayload

// creditStep is how much the client has read when the guest is told, by whatever
// packet goes its way next, and not before. Linux's guests receive in buffers of
// 4 KiB, and with many streams on one processor their kernel runs a stream's reader
// after each of them. An echo that may always send then answers each piece by itself:
// a packet, an update and a change of threads for every 4 KiB. One that waits for a
// large step of credit finds as much to read when it goes on (TCP has the same rule:
// RFC 1122, section 4.2.3.3).
const creditStep = bufAlloc / 2

type connState uint8

const (
	greeting    connState = iota // the client has yet to say CONNECT; the guest knows nothing
	connecting                   // the guest is to answer, or even to be asked
	established                  //
	draining                     // over for the guest but for a reset that it is owed; the client still gets what is buffered
)

// packets that a connection owes the guest, apart from data.
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
	fd        int // the client's socket, -1 when closed
	hostPort  uint32
	guestPort uint32
	state     connState
	debts     debt
	moved     progress      // as it was at movedAt
	movedAt   time.Duration // when it was last seen to get somewhere, or not to wait
	queued    bool          // on the mux's list of those that may have a packet to send

	// The way to the guest.
	readable  bool   // the socket may have something
	ended     bool   // the client sends no more
	gone      bool   // the client receives no more, either
	refused   bool   // the guest receives no more
	peerAlloc uint32 // credit as virtio 1.2, section 5.10.6.3 has it:
	peerFwd   uint32 // what the guest's reader has taken,
	sent      uint32 // and what we sent, both modulo 2^32
	asked     bool   // the guest was asked for credit during this shortage

	// The way from the guest.
	finished bool   // the guest sends no more
	pending  buffer // what the client has not taken yet
	fwd      uint32 // what it has taken, modulo 2^32
	toldFwd  uint32 // fwd as the guest knows it
}

// credit is how many bytes the guest has room for. A guest that takes its
// promise back has no room, rather than a lot.
func (c *connection) credit() int {
	inFlight := c.sent - c.peerFwd
	if inFlight >= c.peerAlloc {
		return 0
	}
	return int(c.peerAlloc - inFlight)
}

// mayRead says whether bytes of the client can go to the guest now.
func (c *connection) mayRead() bool {
	return c.state == established && c.readable && !c.ended && !c.refused && c.credit() > 0
}

// hasPacket says whether there may be something to send to the guest.
func (c *connection) hasPacket() bool { return c.debts != 0 || c.mayRead() }

// known says whether the guest's packets may name this connection.
func (c *connection) known() bool { return c.state == connecting || c.state == established }

// taken counts bytes that the client's socket accepted.
func (c *connection) taken(n int) {
	c.fwd += uint32(n)
	if c.state == established && c.fwd-c.toldFwd >= creditStep {
		c.debts |= oweCreditUpdate
	}
}

// buffer is a queue of bytes. Empty, it holds no memory.
type buffer struct {
	bytes []byte
	start int
}

func (b *buffer) len() int { return len(b.bytes) - b.start }

// push copies s to the end.
func (b *buffer) push(s segments) {
	if b.start > 0 && len(b.bytes)+s.size() > cap(b.bytes) {
		b.bytes = b.bytes[:copy(b.bytes, b.bytes[b.start:])]
		b.start = 0
	}
	for _, p := range s {
		b.bytes = append(b.bytes, p...)
	}
}

// pop drops n bytes from the beginning.
func (b *buffer) pop(n int) {
	b.start += n
	if b.len() == 0 {
		*b = buffer{}
	}
}

// peek is what is queued; it is valid until the next push or pop.
func (b *buffer) peek() []byte { return b.bytes[b.start:] }

// retryable says whether a non-blocking call is to be made again later.
func retryable(err error) bool { return err == unix.EAGAIN || err == unix.EINTR }
