package vhostvsock

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

const (
	// maxConnections limits the clients of one guest.
	maxConnections = 4096

	// maxStrays limits the resets that belong to no connection and wait for room in the rx queue.
	// If a guest causes more without providing buffers for them, it gets fewer answers.
	maxStrays = 256

	// Host ports are from the upper half of the positive values of a signed int, where no service
	// listens.
	firstHostPort = 1 << 30
	lastHostPort  = 1<<31 - 1

	// Edge triggered, so that a client that must not be read now causes no events.
	clientEvents = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET

	// Edge triggered: every kick is an edge, and nothing reads the counter.
	kickEvents = unix.EPOLLIN | unix.EPOLLET
)

// mux handles the streams of all clients of one guest. Only one goroutine uses it. It never blocks:
// bytes that cannot be passed on wait in their connection.
type mux struct {
	poll     *poller
	guestCID uint64
	log      logrus.FieldLogger

	conns    map[uint32]*connection // by host port
	nextPort uint32
	ready    []*connection  // connections that may have a packet to send, in order
	strays   []packetHeader // resets for packets of no connection
	down     bool           // the guest broke its queues, and no client can be connected
	most     int            // the greatest number of connections
	now      time.Duration  // the backend's clock when the current events were received

	parts segments // reused scratch memory
}

func newMux(p *poller, guestCID uint64, log logrus.FieldLogger) *mux {
	return &mux{poll: p, guestCID: guestCID, log: log, conns: make(map[uint32]*connection), nextPort: firstHostPort, most: maxConnections}
}

// close closes every client.
func (m *mux) close() {
	for _, c := range m.conns {
		c.debts = 0
		m.drop(c)
	}
	m.ready, m.strays = nil, nil
}

// guestRestarted ends the connections that the guest has forgotten. Clients that the guest has not
// heard of yet keep waiting.
func (m *mux) guestRestarted() {
	m.strays, m.down = nil, false
	for _, c := range m.conns {
		if c.state != greeting && c.debts&oweRequest == 0 {
			m.detach(c)
		}
	}
}

// guestBroken ends all connections, and makes new ones fail until the guest restarts the device.
func (m *mux) guestBroken() {
	m.strays, m.down = nil, true
	for _, c := range m.conns {
		if c.state != greeting {
			m.detach(c)
		}
	}
}

// add takes over the non-blocking socket of a new client.
func (m *mux) add(fd int) {
	if len(m.conns) >= m.most {
		m.log.Warnf("connection refused: %d are open", m.most)
		unix.Close(fd)
		return
	}
	for m.conns[m.nextPort] != nil {
		m.advancePort()
	}
	c := &connection{fd: fd, hostPort: m.nextPort, movedAt: m.now}
	m.advancePort()
	if err := m.poll.add(fd, clientEvents, sourceClient, c.hostPort); err != nil {
		m.log.Warnf("connection refused: %v", err)
		unix.Close(fd)
		return
	}
	m.conns[c.hostPort] = c
}

func (m *mux) advancePort() {
	if m.nextPort++; m.nextPort > lastHostPort {
		m.nextPort = firstHostPort
	}
}

// clientEvent handles a client's event from the poller.
func (m *mux) clientEvent(hostPort uint32, events uint32) {
	c := m.conns[hostPort]
	if c == nil || c.fd < 0 {
		return
	}
	c.readable = true
	if c.state == greeting {
		m.greet(c)
	}
	if events&unix.EPOLLOUT != 0 && c.fd >= 0 {
		m.flush(c)
	}
	if events&(unix.EPOLLHUP|unix.EPOLLERR) != 0 && c.fd >= 0 {
		m.clientGone(c)
	}
	m.enqueue(c)
}

// greet reads the client's first line when it is complete, and prepares a request to the guest.
func (m *mux) greet(c *connection) {
	port, err := readConnect(c.fd)
	if errors.Is(err, errNoLine) {
		return
	}
	if err == nil && m.down {
		err = errors.New("the guest's device is broken")
	}
	if err != nil {
		m.log.Debugf("client refused: %v", err)
		m.abort(c)
		return
	}
	c.guestPort, c.state = port, connecting
	c.debts |= oweRequest
}

// clientGone handles a client that neither sends nor receives any more. The bytes that it sent
// before are still delivered.
func (m *mux) clientGone(c *connection) {
	switch {
	case c.state == draining:
		m.drop(c)
	case c.state != established, c.pending.len() > 0:
		m.abort(c)
	default:
		c.gone = true
		if c.ended || c.refused {
			c.debts |= oweShutdown
		}
	}
}

// drop closes a connection's client, and forgets the connection unless packets to the guest are
// still due.
func (m *mux) drop(c *connection) {
	if c.fd >= 0 {
		m.poll.closeFD(c.fd)
	}
	c.fd, c.state, c.pending = -1, draining, buffer{}
	if c.debts == 0 {
		delete(m.conns, c.hostPort)
		return
	}
	m.enqueue(c)
}

// abort ends a connection at once, on both sides.
func (m *mux) abort(c *connection) {
	if c.known() && c.debts&oweRequest == 0 {
		c.debts = oweReset
	}
	c.debts &= oweReset
	m.drop(c)
}

// disconnect aborts the connection with the given host port.
func (m *mux) disconnect(hostPort uint32) {
	if c := m.conns[hostPort]; c != nil {
		m.abort(c)
	}
}

// detach ends a connection that has ended in the guest: the client gets the buffered bytes and is
// then closed.
func (m *mux) detach(c *connection) {
	c.state, c.debts = draining, 0
	m.dropDrained(c)
}

// dropDrained drops a draining connection if nothing is buffered any more.
func (m *mux) dropDrained(c *connection) {
	if c.pending.len() == 0 {
		m.drop(c)
	}
}

// violation aborts a connection after a packet that breaks the protocol.
func (m *mux) violation(c *connection, format string, args ...any) {
	m.log.Debugf("guest port %d: reset: %s", c.guestPort, fmt.Sprintf(format, args...))
	m.abort(c)
}

// accepted tells the client that the guest has accepted.
func (m *mux) accepted(c *connection) {
	c.state = established
	line := "OK " + strconv.FormatUint(uint64(c.hostPort), 10) + "\n"
	if n, err := unix.Write(c.fd, []byte(line)); n != len(line) {
		m.log.Debugf("client of guest port %d: %v", c.guestPort, err)
		m.abort(c)
	}
}

// deliver passes bytes from the guest to the client, and buffers the bytes that the client's socket
// does not take.
func (m *mux) deliver(c *connection, payload segments) {
	size := payload.size()
	if size > bufAlloc-c.pending.len() {
		m.violation(c, "it sent %d bytes, and %d of its credit of %d are used", size, c.pending.len(), bufAlloc)
		return
	}
	n := 0
	if c.pending.len() == 0 && size > 0 {
		var err error
		n, err = unix.Writev(c.fd, payload)
		if err != nil && !retryable(err) {
			m.log.Debugf("client of guest port %d: %v", c.guestPort, err)
			m.abort(c)
			return
		}
		n = max(n, 0)
		c.taken(n)
	}
	if n == size {
		return
	}
	wasEmpty := c.pending.len() == 0
	c.pending.push(payload.appendRange(nil, n, size-n))
	if wasEmpty {
		m.watchWritable(c, true)
	}
}

// watchWritable turns events for a writable client socket on or off. They are normally off, because
// each read by the client would cause one.
func (m *mux) watchWritable(c *connection, on bool) {
	events := uint32(clientEvents)
	if on {
		events |= unix.EPOLLOUT
	}
	if err := m.poll.modify(c.fd, events, sourceClient, c.hostPort); err != nil {
		m.log.Warnf("client of guest port %d: %v", c.guestPort, err)
		m.abort(c)
	}
}

// flush writes buffered bytes to a client that reads again.
func (m *mux) flush(c *connection) {
	for c.pending.len() > 0 {
		n, err := unix.Write(c.fd, c.pending.peek())
		if err != nil && !retryable(err) {
			m.log.Debugf("client of guest port %d: %v", c.guestPort, err)
			m.abort(c)
			return
		}
		if n <= 0 {
			return
		}
		c.pending.pop(n)
		c.taken(n)
	}
	if c.state == draining {
		m.drop(c)
		return
	}
	if c.finished {
		unix.Shutdown(c.fd, unix.SHUT_WR)
	}
	m.watchWritable(c, false)
}

// enqueue appends a connection to ready if it has something for the guest.
func (m *mux) enqueue(c *connection) {
	if !c.queued && c.hasPacket() {
		c.queued = true
		m.ready = append(m.ready, c)
	}
}
