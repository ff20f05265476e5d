package vhostvsock

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// minReceiveBuffer is the smallest chain that we take in the rx queue: a
// header and something to say.
const minReceiveBuffer = packetHeaderSize + 1

// checkReceiveBuffer refuses a chain in which no packet has room.
func checkReceiveBuffer(room segments) error {
	if n := room.size(); n < minReceiveBuffer {
		return fmt.Errorf("receive buffer of %d bytes, want at least %d", n, minReceiveBuffer)
	}
	return nil
}

// waiting says whether there may be a packet for the guest.
func (m *mux) waiting() bool { return len(m.strays) > 0 || len(m.ready) > 0 }

// fill writes the next packet for the guest into room and returns its size, 0
// if there turned out to be none.
func (m *mux) fill(room segments) int {
	if len(m.strays) > 0 {
		h := m.strays[0]
		m.strays = m.strays[1:]
		return put(room, &h)
	}
	for len(m.ready) > 0 {
		c := m.ready[0]
		m.ready[0] = nil
		m.ready = m.ready[1:]
		c.queued = false
		n := m.packet(c, room)
		m.enqueue(c) // at the end: the others come first
		if n > 0 {
			return n
		}
	}
	return 0
}

// packet writes the next packet of c. The order matters: data goes before the
// shutdown that follows it, and both carry the credit where an update is owed.
func (m *mux) packet(c *connection, room segments) int {
	switch {
	case c.debts&oweReset != 0:
		c.debts = 0
		if c.fd < 0 {
			m.drop(c)
		}
		return m.put(c, room, packetHeader{op: opReset})
	case c.debts&oweRequest != 0:
		c.debts &^= oweRequest
		return m.put(c, room, packetHeader{op: opRequest})
	}
	if c.mayRead() {
		if n := m.forward(c, room); n > 0 {
			return n
		}
	}
	switch {
	case c.debts&oweShutdown != 0:
		return m.shutdown(c, room)
	case c.debts&oweCreditRequest != 0:
		c.debts &^= oweCreditRequest
		return m.put(c, room, packetHeader{op: opCreditRequest})
	case c.debts&oweCreditUpdate != 0:
		return m.put(c, room, packetHeader{op: opCreditUpdate})
	}
	return 0
}

// forward reads from the client straight into the guest's buffers, behind the
// header, as much as the buffers and the guest's credit allow.
func (m *mux) forward(c *connection, room segments) int {
	limit := min(c.credit(), maxPacketPayload)
	m.parts = room.appendRange(m.parts[:0], packetHeaderSize, limit)
	n, err := unix.Readv(c.fd, m.parts)
	switch {
	case errors.Is(err, unix.EINTR):
		return 0
	case errors.Is(err, unix.EAGAIN):
		c.readable = false
		return 0
	case err != nil:
		m.log.Debugf("client of guest port %d: %v", c.guestPort, err)
		m.abort(c)
		return 0
	case n == 0:
		c.ended = true
		c.debts |= oweShutdown
		return 0
	}
	c.sent += uint32(n)
	if c.credit() == 0 && !c.asked {
		c.asked = true
		c.debts |= oweCreditRequest
	}
	return m.put(c, room, packetHeader{op: opData, length: uint32(n)}) + n
}

// shutdown says that the client sends no more, and once it is gone that it
// receives no more: then the connection is over, and what the guest may still
// send is answered with a reset.
func (m *mux) shutdown(c *connection, room segments) int {
	if !c.gone {
		c.debts &^= oweShutdown
		return m.put(c, room, packetHeader{op: opShutdown, flags: shutdownSend})
	}
	c.debts = 0
	m.drop(c)
	return m.put(c, room, packetHeader{op: opShutdown, flags: shutdownBoth})
}

// put completes a header of c with its ports and our credit, and writes it.
func (m *mux) put(c *connection, room segments, h packetHeader) int {
	h.srcCID, h.dstCID = hostCID, m.guestCID
	h.srcPort, h.dstPort = c.hostPort, c.guestPort
	h.typ = typeStream
	if c.debts&oweCreditUpdate != 0 {
		c.toldFwd = c.fwd
		c.debts &^= oweCreditUpdate
	}
	h.bufAlloc, h.fwdCnt = bufAlloc, c.toldFwd
	return put(room, &h)
}

// put writes a header to the beginning of room.
func put(room segments, h *packetHeader) int {
	var b [packetHeaderSize]byte
	h.encode(&b)
	return room.copyFrom(b[:])
}
