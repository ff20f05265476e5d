package vhostvsock

import "encoding/binary"

// Sizes and numbers of linux/virtio_vsock.h.
const (
	packetHeaderSize = 44

	// maxPacketPayload limits the payload of one packet in both directions. It is the most that
	// Linux sends (VIRTIO_VSOCK_MAX_PKT_BUF_SIZE).
	maxPacketPayload = 64 << 10

	hostCID = 2 // VMADDR_CID_HOST

	typeStream = 1

	shutdownReceive = 1 << 0 // the sender will receive no more
	shutdownSend    = 1 << 1 // the sender will send no more
	shutdownBoth    = shutdownReceive | shutdownSend
)

// operation is the purpose of a packet.
type operation uint16

const (
	opRequest       operation = 1
	opResponse      operation = 2
	opReset         operation = 3
	opShutdown      operation = 4
	opData          operation = 5 // VIRTIO_VSOCK_OP_RW
	opCreditUpdate  operation = 6
	opCreditRequest operation = 7
)

// packetHeader is struct virtio_vsock_hdr.
type packetHeader struct {
	srcCID, dstCID   uint64
	srcPort, dstPort uint32
	length           uint32
	typ              uint16
	op               operation
	flags            uint32
	bufAlloc, fwdCnt uint32
}

// decodePacketHeader never fails: the receiver must check every value.
func decodePacketHeader(b *[packetHeaderSize]byte) packetHeader {
	le := binary.LittleEndian
	return packetHeader{
		srcCID:   le.Uint64(b[0:]),
		dstCID:   le.Uint64(b[8:]),
		srcPort:  le.Uint32(b[16:]),
		dstPort:  le.Uint32(b[20:]),
		length:   le.Uint32(b[24:]),
		typ:      le.Uint16(b[28:]),
		op:       operation(le.Uint16(b[30:])),
		flags:    le.Uint32(b[32:]),
		bufAlloc: le.Uint32(b[36:]),
		fwdCnt:   le.Uint32(b[40:]),
	}
}

func (h *packetHeader) encode(b *[packetHeaderSize]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], h.srcCID)
	le.PutUint64(b[8:], h.dstCID)
	le.PutUint32(b[16:], h.srcPort)
	le.PutUint32(b[20:], h.dstPort)
	le.PutUint32(b[24:], h.length)
	le.PutUint16(b[28:], h.typ)
	le.PutUint16(b[30:], uint16(h.op))
	le.PutUint32(b[32:], h.flags)
	le.PutUint32(b[36:], h.bufAlloc)
	le.PutUint32(b[40:], h.fwdCnt)
}
