package vhostvsock

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// minReceiveBuffer is the smallest accepted chain in the rx queue: a header and one byte of data.
const minReceiveBuffer = packetHeaderSize + 1

// checkReceiveBuffer refuses a chain that is too small for a packet.
func checkReceiveBuffer(room segments) error {
	if n := room.size(); n < minReceiveBuffer {
		return fmt.Errorf("receive buffer of %d bytes, want at least %d", n, minReceiveBuffer)
	}
	return nil
}

// waiting reports whether there may be a packet for the guest.
func (m *mux) waiting() bool { return len(m.strays) > 0 || len(m.ready) > 0 }

// fill writes the next packet for the guest into room and returns the packet's size, or 0 if there
// was none.
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
		m.enqueue(c) // at the end, after the other connections
		if n > 0 {
			return n
		}
	}
	return 0
}

// packet writes the next packet of c. The order matters: data precedes the shutdown that follows
// it. Both kinds of packet also carry a due credit update.
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

// forward reads from the client directly into the guest's buffers, after the header, as much as the
// buffers and the guest's credit allow.
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

// shutdown tells the guest that the client sends no more and, if the client is gone, that it
// receives no more either. In that case the connection is over, and later packets from the guest
// are answered with a reset.
func (m *mux) shutdown(c *connection, room segments) int {
	if !c.gone {
		c.debts &^= oweShutdown
		return m.put(c, room, packetHeader{op: opShutdown, flags: shutdownSend})
	}
	c.debts = 0
	m.drop(c)
	return m.put(c, room, packetHeader{op: opShutdown, flags: shutdownBoth})
}

// put completes a header of c with its ports and this side's credit, and writes it.
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
