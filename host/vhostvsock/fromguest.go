package vhostvsock

import "golang.org/x/sys/unix"

// receive handles one packet from the guest, which is in a chain of the tx queue. Virtio 1.2,
// section 5.10.6, specifies the operations.
func (m *mux) receive(chain segments) {
	var b [packetHeaderSize]byte
	if chain.copyTo(b[:]) < len(b) {
		m.log.Debug("guest: packet without a whole header dropped")
		return
	}
	h := decodePacketHeader(&b)
	if h.srcCID != m.guestCID || h.dstCID != hostCID {
		m.log.Debugf("guest: packet from CID %d to %d dropped", h.srcCID, h.dstCID)
		return
	}
	c := m.conns[h.dstPort]
	if c == nil || !c.known() || c.guestPort != h.srcPort || c.debts&oweRequest != 0 {
		m.answerStray(&h)
		return
	}
	m.parts = chain.appendRange(m.parts[:0], packetHeaderSize, int(min(h.length, maxPacketPayload)))
	switch {
	case h.typ != typeStream:
		m.violation(c, "a packet of socket type %d", h.typ)
	case h.length > maxPacketPayload || int(h.length) != m.parts.size():
		m.violation(c, "a packet of %d bytes, limit %d, in buffers that hold %d", h.length, maxPacketPayload, m.parts.size())
	default:
		c.peerAlloc, c.peerFwd = h.bufAlloc, h.fwdCnt
		m.operate(c, &h, m.parts)
	}
	m.enqueue(c)
}

// answerStray answers a packet that belongs to no connection with a reset: a packet to an unknown
// port, or for a connection that the guest begins.
func (m *mux) answerStray(h *packetHeader) {
	if h.op == opReset || len(m.strays) == maxStrays {
		return
	}
	m.strays = append(m.strays, packetHeader{
		srcCID: h.dstCID, dstCID: h.srcCID, srcPort: h.dstPort, dstPort: h.srcPort, typ: h.typ, op: opReset,
	})
}

// operate carries out a packet that belongs to c.
func (m *mux) operate(c *connection, h *packetHeader, payload segments) {
	if h.op == opReset {
		m.detach(c)
		return
	}
	if c.state == connecting {
		if h.op != opResponse {
			m.violation(c, "operation %d before it accepted", h.op)
			return
		}
		m.accepted(c)
		return
	}
	switch h.op {
	case opData:
		if c.finished {
			m.violation(c, "data after it shut down sending")
			return
		}
		m.deliver(c, payload)
	case opShutdown:
		m.guestShutdown(c, h.flags)
	case opCreditUpdate:
	case opCreditRequest:
		c.debts |= oweCreditUpdate
	default:
		m.violation(c, "operation %d", h.op)
	}
	if c.credit() > 0 {
		c.asked = false
	}
}

// guestShutdown passes a half-close on to the client's socket. When both halves are closed, the
// guest gets the reset that it waits for at once, even if the client still has buffered bytes to
// read.
func (m *mux) guestShutdown(c *connection, flags uint32) {
	if flags&shutdownReceive != 0 && !c.refused {
		c.refused = true
		unix.Shutdown(c.fd, unix.SHUT_RD)
	}
	if flags&shutdownSend != 0 && !c.finished {
		c.finished = true
		if c.pending.len() == 0 {
			unix.Shutdown(c.fd, unix.SHUT_WR)
		}
	}
	if c.refused && c.finished {
		c.state, c.debts = draining, oweReset
		m.dropDrained(c)
	}
}
