package vhostvsock

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// patience is how long a test waits for an event that must come. It does not measure speed: only a
// failed test waits that long.
const patience = 30 * time.Second

const testCID = 7

// The fake machine's memory: rings are in one region and buffers in another. Each region has
// different addresses for the guest and for the front end.
const (
	ringGuest, ringUser     = 0x1000, 0x7f00_0000_0000
	bufferGuest, bufferUser = 0x10_0000, 0x7f10_0000_0000

	ringBytes   = 64 << 10
	slotBytes   = 80 << 10 // size of a buffer slot: a header and more than the longest payload
	slots       = 16
	bufferBytes = 2 * slots * slotBytes
)

// frontEnd plays both QEMU and the guest's driver: it speaks vhost-user to the backend, and uses
// the two queues from the driver's side.
type frontEnd struct {
	t      *testing.T
	conn   *net.UnixConn
	memfd  int
	rings  []byte
	bufs   []byte
	rx, tx *driverQueue
}

// driverQueue is the driver's side of a split ring of 2*slots descriptors. Slot i owns descriptors
// 2i and 2i+1 and one buffer.
type driverQueue struct {
	fe       *frontEnd
	index    uint32
	base     int // offset of its rings in the ring region
	buffers  int // offset of its slots in the buffer region
	avail    uint16
	lastUsed uint16
	kick     int
	call     int
	err      int
	busy     [slots]bool
}

const (
	queueSize = 2 * slots
	availAt   = queueSize * descSize
	usedAt    = availAt + 4 + 2*queueSize + 2 + 2 // the last 2 are for alignment
)

// startBackend serves a backend, and returns it with a channel for Serve's result. A bug in the
// backend's log fails the test.
func startBackend(t *testing.T) (*Backend, <-chan error) {
	t.Helper()
	return startLoggedBackend(t, failingLog(t))
}

func startLoggedBackend(t *testing.T, log logrus.FieldLogger) (*Backend, <-chan error) {
	t.Helper()
	dir := t.TempDir()
	b, err := Listen(Config{Socket: filepath.Join(dir, "q"), UDSPath: filepath.Join(dir, "c"), GuestCID: testCID, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- b.Serve(context.Background()) }()
	t.Cleanup(func() { b.Close() })
	return b, served
}

// connectFrontEnd connects, negotiates the features, and shares the machine's memory.
func connectFrontEnd(t *testing.T, b *Backend) *frontEnd {
	t.Helper()
	fe := dialFrontEnd(t, b)
	if got, want := fe.getUint64(reqGetFeatures), uint64(features); got != want {
		t.Fatalf("features\n got %#x\nwant %#x", got, want)
	}
	if got, want := fe.getUint64(reqGetProtocolFeatures), uint64(protocolFeatures); got != want {
		t.Fatalf("protocol features\n got %#x\nwant %#x", got, want)
	}
	fe.setUint64(reqSetProtocolFeatures, protocolFeatures)
	fe.send(reqSetOwner, nil)
	fe.setUint64(reqSetFeatures, features)
	fe.shareMemory()
	return fe
}

// bootGuest starts both queues and gives the device all receive buffers.
func bootGuest(t *testing.T, b *Backend) *frontEnd {
	t.Helper()
	fe := connectFrontEnd(t, b)
	fe.startQueues()
	for slot := range slots {
		fe.rx.give(slot, packetHeaderSize, 4096)
	}
	return fe
}

func dialFrontEnd(t *testing.T, b *Backend) *frontEnd {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: b.cfg.Socket})
	if err != nil {
		t.Fatal(err)
	}
	fe := &frontEnd{t: t, conn: conn, memfd: -1}
	t.Cleanup(fe.close)
	conn.SetDeadline(time.Now().Add(patience))
	fe.memfd, err = unix.MemfdCreate("guest", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fe.memfd, ringBytes+bufferBytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fe.memfd, 0, ringBytes+bufferBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	fe.rings, fe.bufs = mem[:ringBytes], mem[ringBytes:]
	fe.rx = fe.newQueue(rxQueue)
	fe.tx = fe.newQueue(txQueue)
	return fe
}

func (fe *frontEnd) newQueue(index uint32) *driverQueue {
	q := &driverQueue{fe: fe, index: index, base: int(index) * ringBytes / 2, buffers: int(index) * slots * slotBytes}
	for _, fd := range []*int{&q.kick, &q.call, &q.err} {
		var err error
		if *fd, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
			fe.t.Fatal(err)
		}
		fe.t.Cleanup(func() { unix.Close(*fd) })
	}
	return q
}

func (fe *frontEnd) close() {
	fe.conn.Close()
	if fe.memfd >= 0 {
		unix.Close(fe.memfd)
		fe.memfd = -1
	}
}

// send sends a request that the backend acknowledges, and expects the answer 0.
func (fe *frontEnd) send(req request, payload []byte, fds ...int) {
	fe.t.Helper()
	fe.post(req, flagNeedReply, payload, fds...)
	reply := fe.reply(req)
	if got, want := reply, uint64Reply(0); !bytes.Equal(got, want) && req != reqSetOwner && req != reqSetProtocolFeatures {
		fe.t.Fatalf("request %d acknowledged with\n got %x\nwant %x", req, got, want)
	}
}

// post sends a request without waiting for an answer.
func (fe *frontEnd) post(req request, flags uint32, payload []byte, fds ...int) {
	fe.t.Helper()
	if _, _, err := fe.conn.WriteMsgUnix(encodeRequest(req, flags, payload), unix.UnixRights(fds...), nil); err != nil {
		fe.t.Fatal(err)
	}
}

func encodeRequest(req request, flags uint32, payload []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(req))
	b = binary.LittleEndian.AppendUint32(b, version1|flags)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// reply reads the answer to req.
func (fe *frontEnd) reply(req request) []byte {
	fe.t.Helper()
	head := make([]byte, messageHeaderSize)
	if _, err := io.ReadFull(fe.conn, head); err != nil {
		fe.t.Fatalf("reply to request %d: %v", req, err)
	}
	got, flags, size, err := parseMessageHeader(head)
	if err != nil || got != req || flags != version1|flagReply {
		fe.t.Fatalf("reply to request %d: request %d, flags %#x, %v", req, got, flags, err)
	}
	payload := make([]byte, size)
	if _, err := io.ReadFull(fe.conn, payload); err != nil {
		fe.t.Fatal(err)
	}
	return payload
}

func (fe *frontEnd) getUint64(req request) uint64 {
	fe.t.Helper()
	fe.post(req, 0, nil)
	v, err := parseUint64(fe.reply(req))
	if err != nil {
		fe.t.Fatal(err)
	}
	return v
}

func (fe *frontEnd) setUint64(req request, v uint64) {
	fe.t.Helper()
	fe.send(req, uint64Reply(v))
}

func encodeMemTable(specs ...regionSpec) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(specs)))
	b = binary.LittleEndian.AppendUint32(b, 0)
	for _, s := range specs {
		for _, v := range []uint64{s.guestAddr, s.size, s.userAddr, s.offset} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
	}
	return b
}

func (fe *frontEnd) shareMemory() {
	fe.t.Helper()
	fe.send(reqSetMemTable, encodeMemTable(
		regionSpec{guestAddr: ringGuest, size: ringBytes, userAddr: ringUser},
		regionSpec{guestAddr: bufferGuest, size: bufferBytes, userAddr: bufferUser, offset: ringBytes},
	), fe.memfd, fe.memfd)
}

func vringState(index, num uint32) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, index), num)
}

func (q *driverQueue) addresses() []byte {
	b := vringState(q.index, 0)
	user := uint64(ringUser + q.base)
	for _, v := range []uint64{user, user + usedAt, user + availAt, 0} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// startQueues starts both queues at their drivers' positions.
func (fe *frontEnd) startQueues() {
	fe.t.Helper()
	for _, q := range []*driverQueue{fe.rx, fe.tx} {
		fe.send(reqSetVringNum, vringState(q.index, queueSize))
		fe.send(reqSetVringBase, vringState(q.index, uint32(q.lastUsed)))
		fe.send(reqSetVringAddr, q.addresses())
		fe.send(reqSetVringCall, uint64Reply(uint64(q.index)), q.call)
		fe.send(reqSetVringErr, uint64Reply(uint64(q.index)), q.err)
		fe.send(reqSetVringKick, uint64Reply(uint64(q.index)), q.kick)
		fe.send(reqSetVringEnable, vringState(q.index, 1))
	}
}

// stopQueues stops both queues and returns their bases.
func (fe *frontEnd) stopQueues() (rx, tx uint32) {
	fe.t.Helper()
	var bases [queueCount]uint32
	for i := range bases {
		fe.send(reqSetVringEnable, vringState(uint32(i), 0))
		fe.post(reqGetVringBase, 0, vringState(uint32(i), 0))
		index, num, err := parseVringState(fe.reply(reqGetVringBase))
		if err != nil || index != uint32(i) {
			fe.t.Fatalf("base of queue %d: queue %d, %v", i, index, err)
		}
		bases[i] = num
	}
	return bases[rxQueue], bases[txQueue]
}

// restart makes the guest's driver start afresh: with empty rings, from the beginning, and with all
// receive buffers.
func (fe *frontEnd) restart() {
	fe.stopQueues()
	fe.rx.reset()
	fe.tx.reset()
	fe.startQueues()
	for slot := range slots {
		fe.rx.give(slot, packetHeaderSize, 4096)
	}
}

func (q *driverQueue) reset() {
	clear(q.fe.rings[q.base : q.base+ringBytes/2])
	q.avail, q.lastUsed, q.busy = 0, 0, [slots]bool{}
}

func (q *driverQueue) ring() []byte { return q.fe.rings[q.base : q.base+ringBytes/2] }

func (q *driverQueue) slot(i int) []byte {
	at := q.buffers + i*slotBytes
	return q.fe.bufs[at : at+slotBytes]
}

func (q *driverQueue) slotGuest(i int) uint64 { return uint64(bufferGuest + q.buffers + i*slotBytes) }

func (q *driverQueue) writeDesc(i uint16, addr uint64, length uint32, flags, next uint16) {
	d := q.ring()[int(i)*descSize:]
	binary.LittleEndian.PutUint64(d, addr)
	binary.LittleEndian.PutUint32(d[8:], length)
	binary.LittleEndian.PutUint16(d[12:], flags)
	binary.LittleEndian.PutUint16(d[14:], next)
}

// give puts a slot's buffer into the queue as two descriptors.
func (q *driverQueue) give(slot, first, second int) {
	var flags uint16
	if q.index == rxQueue {
		flags = descWrite
	}
	head := uint16(2 * slot)
	q.writeDesc(head, q.slotGuest(slot), uint32(first), flags|descNext, head+1)
	q.writeDesc(head+1, q.slotGuest(slot)+uint64(first), uint32(second), flags, 0)
	q.busy[slot] = true
	q.offer(head)
}

// offer makes a chain available, and kicks the device if it asked for that.
func (q *driverQueue) offer(head uint16) {
	ring := q.ring()
	binary.LittleEndian.PutUint16(ring[availAt+4+2*int(q.avail%queueSize):], head)
	old := q.avail
	q.avail++
	store16(ring, availAt+2, q.avail)
	event := load16(ring, usedAt+4+8*queueSize)
	if q.avail-event-1 < q.avail-old {
		signal(q.kick)
	}
}

// take waits until the device has returned a chain.
func (q *driverQueue) take() (slot, written int) {
	q.fe.t.Helper()
	slot, written, ok := q.takeUntil(q.call, time.Now().Add(patience))
	if !ok {
		q.fe.t.Fatalf("queue %d: the device returned no chain, or did not signal it", q.index)
	}
	return slot, written
}

// returned reports whether the device has returned a chain that was not taken yet.
func (q *driverQueue) returned() bool { return load16(q.ring(), usedAt+2) != q.lastUsed }

// takeUntil waits for a returned chain as a driver does: it asks for a signal, checks the ring once
// more, and then waits on the call eventfd.
func (q *driverQueue) takeUntil(call int, deadline time.Time) (slot, written int, ok bool) {
	ring := q.ring()
	store16(ring, availAt+4+2*queueSize, q.lastUsed)
	for !q.returned() {
		if !await(call, deadline) {
			return 0, 0, false
		}
	}
	entry := ring[usedAt+4+8*int(q.lastUsed%queueSize):]
	q.lastUsed++
	slot = int(binary.LittleEndian.Uint32(entry)) / 2
	q.busy[slot] = false
	return slot, int(binary.LittleEndian.Uint32(entry[4:])), true
}

// await waits for an eventfd and resets its counter.
func await(fd int, deadline time.Time) bool {
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, int(max(0, time.Until(deadline).Milliseconds())))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n == 1 {
			var b [8]byte
			unix.Read(fd, b[:])
			return true
		}
		return false
	}
}

// packet is a packet in a queue.
type packet struct {
	packetHeader
	payload []byte
}

// receive takes the next packet for the guest and returns its buffer to the queue.
func (fe *frontEnd) receive() packet {
	fe.t.Helper()
	slot, written := fe.rx.take()
	p := fe.decode(slot, written)
	fe.rx.give(slot, packetHeaderSize, 4096)
	return p
}

func (fe *frontEnd) decode(slot, written int) packet {
	fe.t.Helper()
	b := fe.rx.slot(slot)[:written]
	if written < packetHeaderSize {
		fe.t.Fatalf("packet of %d bytes", written)
	}
	h := decodePacketHeader((*[packetHeaderSize]byte)(b))
	if h.srcCID != hostCID || h.dstCID != testCID || h.typ != typeStream || int(h.length) != written-packetHeaderSize {
		fe.t.Fatalf("packet of %d bytes with header %+v", written, h)
	}
	return packet{h, bytes.Clone(b[packetHeaderSize:])}
}

// expect receives a packet of the given kind.
func (fe *frontEnd) expect(op operation) packet {
	fe.t.Helper()
	p := fe.receive()
	if p.op != op {
		fe.t.Fatalf("operation\n got %d (%+v)\nwant %d", p.op, p.packetHeader, op)
	}
	return p
}

// transmit sends a header and a payload unchanged, and waits until the device has taken them.
func (fe *frontEnd) transmit(h packetHeader, payload []byte) {
	fe.t.Helper()
	var b [packetHeaderSize]byte
	h.encode(&b)
	slot := fe.tx.slot(0)
	copy(slot, b[:])
	copy(slot[packetHeaderSize:], payload)
	fe.tx.give(0, packetHeaderSize, len(payload))
	fe.tx.take()
}

// guestSocket is the guest's end of a connection.
type guestSocket struct {
	fe                  *frontEnd
	guestPort, hostPort uint32
	bufAlloc, fwdCnt    uint32
}

// send sends a packet of the connection.
func (g *guestSocket) send(op operation, flags uint32, payload []byte) {
	g.fe.t.Helper()
	h := g.header(op)
	h.flags, h.length = flags, uint32(len(payload))
	g.fe.transmit(h, payload)
}

// burst sends more than a client's socket buffers, so that the backend buffers the rest.
func (g *guestSocket) burst() []byte {
	g.fe.t.Helper()
	data := randomBytes(4 * maxPacketPayload)
	for at := 0; at < len(data); at += maxPacketPayload {
		g.send(opData, 0, data[at:at+maxPacketPayload])
	}
	return data
}

func (g *guestSocket) header(op operation) packetHeader {
	return packetHeader{
		srcCID: testCID, dstCID: hostCID, srcPort: g.guestPort, dstPort: g.hostPort,
		typ: typeStream, op: op, bufAlloc: g.bufAlloc, fwdCnt: g.fwdCnt,
	}
}

// expect receives a packet, which must belong to this connection.
func (g *guestSocket) expect(op operation) packet {
	g.fe.t.Helper()
	p := g.fe.expect(op)
	if p.srcPort != g.hostPort || p.dstPort != g.guestPort {
		g.fe.t.Fatalf("packet of another connection: %+v", p.packetHeader)
	}
	return p
}

// dialClient connects to the backend and asks for a port.
func dialClient(t *testing.T, b *Backend, port string) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: b.cfg.UDSPath})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "CONNECT "+port+"\n"); err != nil {
		t.Fatal(err)
	}
	return c
}

// connected starts a backend, and connects a client to its guest, whose receive buffer is large.
func connected(t *testing.T) (*Backend, *frontEnd, *net.UnixConn, *guestSocket) {
	t.Helper()
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	c, g := connect(t, b, fe, roomy)
	return b, fe, c, g
}

// connect connects a client to guest port 1024. The guest's receive buffer has bufAlloc bytes.
func connect(t *testing.T, b *Backend, fe *frontEnd, bufAlloc uint32) (*net.UnixConn, *guestSocket) {
	t.Helper()
	c := dialClient(t, b, "1024")
	return c, accept(t, fe, c, fe.expect(opRequest), 1024, bufAlloc)
}

// connectPast connects to guest port 2048. Packets with operation other may arrive in between.
func connectPast(t *testing.T, b *Backend, fe *frontEnd, other operation) (*net.UnixConn, *guestSocket) {
	t.Helper()
	c := dialClient(t, b, "2048")
	p := fe.receive()
	for p.op == other {
		p = fe.receive()
	}
	return c, accept(t, fe, c, p, 2048, roomy)
}

// accept makes the guest accept a client's request, and reads the line that the client receives.
func accept(t *testing.T, fe *frontEnd, c *net.UnixConn, p packet, port, bufAlloc uint32) *guestSocket {
	t.Helper()
	if p.op != opRequest || p.dstPort != port || p.bufAlloc == 0 || p.fwdCnt != 0 {
		t.Fatalf("request of port %d: %+v", port, p.packetHeader)
	}
	g := &guestSocket{fe: fe, guestPort: port, hostPort: p.srcPort, bufAlloc: bufAlloc}
	g.send(opResponse, 0, nil)
	want := "OK " + itoa(g.hostPort) + "\n"
	if got := readN(t, c, len(want)); string(got) != want {
		t.Fatalf("answer to CONNECT\n got %q\nwant %q", got, want)
	}
	return g
}

func readN(t *testing.T, c *net.UnixConn, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if m, err := io.ReadFull(c, b); err != nil {
		t.Fatalf("after %d of %d bytes: %v", m, n, err)
	}
	return b
}

// wantEnd expects the client to read the wanted bytes and then the end of the stream.
func wantEnd(t *testing.T, c *net.UnixConn, want string) {
	t.Helper()
	got, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("reading to the end: %v", err)
	}
	if string(got) != want {
		t.Fatalf("read to the end\n got %q\nwant %q", got, want)
	}
}

func wantServed(t *testing.T, served <-chan error, want error) {
	t.Helper()
	select {
	case got := <-served:
		if !errors.Is(got, want) {
			t.Fatalf("Serve returned\n got %v\nwant %v", got, want)
		}
	case <-time.After(patience):
		t.Fatal("Serve has not returned")
	}
}

func wantMissing(t *testing.T, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there (%v)", p, err)
		}
	}
}
