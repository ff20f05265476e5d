package transport

import (
	"io"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/arrival"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// ticketBytes is more than a ticket takes in a frame.
const ticketBytes = 64

// tickets are those of a connection's calls that are not answered.
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

// answered gives a call's ticket back, where it has one.
func (t *tickets) answered(stream uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ticket, ok := t.byStream[stream]; ok {
		t.order.GiveBack(ticket)
		delete(t.byStream, stream)
	}
}

// left gives back those of a connection that is over.
func (t *tickets) left() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, ticket := range t.byStream {
		t.order.GiveBack(ticket)
	}
	t.byStream = nil
}

// ticketed gives a frame that is here whole its ticket, where its call has an order. It
// returns io.EOF for one whose peer has hung up, and may have made its next call on
// another connection already.
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
	// After it was taken: who hangs up from now on calls later.
	if c.hungUp() {
		c.tickets.answered(header.StreamID)
		return nil, io.EOF
	}
	return ttrpcframe.WithMetadata(whole, arrival.Key, strconv.FormatUint(ticket, 10)), nil
}

// hungUp reports whether the peer sends nothing more.
func (c *conn) hungUp() bool {
	fds := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
}
