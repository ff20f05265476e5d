package transport

import (
	"io"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/arrival"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// ticketBytes is more than the length that a ticket adds to a frame.
const ticketBytes = 64

// tickets are the tickets of a connection's calls that are not answered yet.
type tickets struct {
	order *arrival.Order

	mu       sync.Mutex
	byStream map[uint32]uint64
}

func (t *tickets) take(stream uint32) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byStream == nil {
		t.byStream = map[uint32]uint64{}
	}
	ticket := t.order.Take()
	t.byStream[stream] = ticket
	return ticket
}

// answered gives a call's ticket back, if it has one.
func (t *tickets) answered(stream uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ticket, ok := t.byStream[stream]; ok {
		t.order.GiveBack(ticket)
		delete(t.byStream, stream)
	}
}

// left gives back all tickets of a connection that is over.
func (t *tickets) left() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ticket := range t.byStream {
		t.order.GiveBack(ticket)
	}
	t.byStream = nil
}

// ticketed adds a ticket to a whole frame if its call has an order. It returns io.EOF if the peer
// has hung up, because the peer may already have made its next call on another connection.
func (c *conn) ticketed(whole []byte) ([]byte, error) {
	header := ttrpcframe.ParseHeader(whole)
	if c.tickets.order == nil || header.Length+ticketBytes > ttrpcframe.MaxLength {
		return whole, nil
	}
	request, err := ttrpcframe.ParseRequest(whole[ttrpcframe.HeaderBytes:])
	if err != nil || !c.tickets.order.Has(&request) {
		return whole, nil
	}
	ticket := c.tickets.take(header.StreamID)
	// Only after the ticket was taken: a peer that hangs up from now on makes its next call later.
	if c.hungUp() {
		c.tickets.answered(header.StreamID)
		return nil, io.EOF
	}
	return ttrpcframe.WithMetadata(whole, arrival.Key, strconv.FormatUint(ticket, 10)), nil
}

// hungUp reports whether the peer has stopped sending.
func (c *conn) hungUp() bool {
	fds := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
}
