package vhostvsock

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func itoa(v uint32) string { return strconv.FormatUint(uint64(v), 10) }

// roomy is a guest's receive buffer size that no test fills by accident.
const roomy = 1 << 20

func TestBytesGoBothWays(t *testing.T) {
	_, fe, c, g := connected(t)
	for i := range 3 * slots {
		msg := bytes.Repeat([]byte{byte(i)}, 1+100*i)
		c.Write(msg)
		var got []byte
		for len(got) < len(msg) {
			p := fe.receive()
			if p.op != opCreditUpdate {
				got = append(got, p.payload...)
			}
		}
		if !bytes.Equal(got, msg) {
			t.Fatalf("round %d: the guest got %d other bytes", i, len(got))
		}
		g.send(opData, 0, got)
		if back := readN(t, c, len(msg)); !bytes.Equal(back, msg) {
			t.Fatalf("round %d: the client got other bytes back", i)
		}
	}
}

func TestBytesSentBeforeOKAreKept(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	c := dialClient(t, b, "5\nearly")
	p := fe.expect(opRequest)
	g := &guestSocket{fe: fe, guestPort: p.dstPort, hostPort: p.srcPort, bufAlloc: roomy}
	g.send(opResponse, 0, nil)
	if got := g.expect(opData).payload; string(got) != "early\n" {
		t.Errorf("first bytes\n got %q\nwant %q", got, "early\n")
	}
	_ = c
}

func TestRefusedPortClosesClientWithoutOK(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	c := dialClient(t, b, "9")
	p := fe.expect(opRequest)
	g := &guestSocket{fe: fe, guestPort: p.dstPort, hostPort: p.srcPort}
	g.send(opReset, 0, nil)
	wantEnd(t, c, "")
}

func TestBadFirstLineClosesClient(t *testing.T) {
	b, _ := startBackend(t)
	bootGuest(t, b)
	for _, port := range []string{"x", "-1", "4294967295", "4294967296", "", "1 2", "00000000000000000000000000000001"} {
		wantEnd(t, dialClient(t, b, port), "")
	}
}

func TestConnectionMadeBeforeTheDriverWaits(t *testing.T) {
	b, _ := startBackend(t)
	c := dialClient(t, b, "1024")
	fe := bootGuest(t, b)
	p := fe.expect(opRequest)
	g := &guestSocket{fe: fe, guestPort: p.dstPort, hostPort: p.srcPort, bufAlloc: roomy}
	g.send(opResponse, 0, nil)
	readN(t, c, len("OK 1073741824\n"))
}

func TestConnectionsTheGuestBeginsAreReset(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	fe.transmit(packetHeader{srcCID: testCID, dstCID: hostCID, srcPort: 5, dstPort: 6, typ: typeStream, op: opRequest, bufAlloc: roomy}, nil)
	p := fe.expect(opReset)
	if p.srcPort != 6 || p.dstPort != 5 {
		t.Errorf("reset of ports %d to %d, want 6 to 5", p.srcPort, p.dstPort)
	}
}

func TestForeignPacketsAreDropped(t *testing.T) {
	_, fe, _, g := connected(t)
	for _, spoil := range []func(*packetHeader){
		func(h *packetHeader) { h.srcCID = testCID + 1 },
		func(h *packetHeader) { h.dstCID = testCID },
		func(h *packetHeader) { h.dstPort++; h.op = opReset }, // a reset is never answered
	} {
		h := g.header(opCreditRequest)
		spoil(&h)
		fe.transmit(h, nil)
	}
	g.send(opCreditRequest, 0, nil)
	g.expect(opCreditUpdate) // the first and only answer
}

func TestGuestGetsNoMoreThanItsCredit(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	c, g := connect(t, b, fe, 1000)
	msg := make([]byte, 5000)
	for i := range msg {
		msg[i] = byte(i / 7)
	}
	c.Write(msg)
	var got []byte
	for _, limit := range []int{1000, 1600, 1601, 5000} {
		for len(got) < limit {
			got = append(got, g.expect(opData).payload...)
		}
		if len(got) != limit {
			t.Fatalf("the guest got\n got %d\nwant %d", len(got), limit)
		}
		if limit == 5000 {
			break
		}
		g.expect(opCreditRequest)
		// Data would arrive before this answer.
		g.send(opCreditRequest, 0, nil)
		g.expect(opCreditUpdate)
		switch limit {
		case 1000:
			g.fwdCnt = 600
		case 1600:
			g.fwdCnt = 601
		default:
			g.bufAlloc = roomy
		}
		g.send(opCreditUpdate, 0, nil)
	}
	if !bytes.Equal(got, msg) {
		t.Error("the guest got other bytes")
	}
}

func TestCreditTakenBackIsNoCredit(t *testing.T) {
	c := connection{sent: 100, peerAlloc: 50}
	if got := c.credit(); got != 0 {
		t.Errorf("credit\n got %d\nwant 0", got)
	}
	c = connection{sent: 5, peerFwd: 1<<32 - 5, peerAlloc: 30} // the counters wrap
	if got := c.credit(); got != 20 {
		t.Errorf("credit\n got %d\nwant 20", got)
	}
}

// pour sends bytes from the guest while there is credit, and tracks the credit that the backend
// returns.
func (g *guestSocket) pour(t *testing.T, data []byte, chunk int) {
	t.Helper()
	var sent, fwd uint32
	for len(data) > 0 {
		n := min(chunk, len(data), int(bufAlloc-(sent-fwd)))
		if n == 0 {
			fwd = g.expect(opCreditUpdate).fwdCnt
			continue
		}
		g.send(opData, 0, data[:n])
		sent += uint32(n)
		data = data[n:]
	}
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	src := rand.New(rand.NewPCG(1, 2))
	for i := 0; i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], src.Uint64())
	}
	return b
}

func TestBulkFromTheGuestIsIntact(t *testing.T) {
	_, _, c, g := connected(t)
	want := randomBytes(4 << 20)
	done := make(chan []byte)
	go func() {
		got := make([]byte, len(want))
		io.ReadFull(c, got)
		done <- got
	}()
	g.pour(t, want, 50_000)
	if got := <-done; !bytes.Equal(got, want) {
		t.Error("the client got other bytes")
	}
}

func TestSlowClientStallsOnlyItself(t *testing.T) {
	b, fe, slow, g := connected(t)
	// The client reads nothing; the guest sends as much as its credit allows.
	data := g.burst()

	quick, h := connectPast(t, b, fe, opCreditUpdate)
	quick.Write([]byte("ping"))
	for p := fe.receive(); string(p.payload) != "ping"; p = fe.receive() {
	}
	h.send(opData, 0, []byte("pong"))
	if got := readN(t, quick, 4); string(got) != "pong" {
		t.Errorf("beside a slow client\n got %q\nwant %q", got, "pong")
	}
	if got := readN(t, slow, len(data)); !bytes.Equal(got, data) {
		t.Error("the slow client got other bytes")
	}
}

func TestOverrunIsReset(t *testing.T) {
	_, fe, _, g := connected(t)
	chunk := make([]byte, maxPacketPayload)
	// The kernel buffers a little for the client; after that the backend's buffer is full.
	for range 64 {
		g.send(opData, 0, chunk)
	}
	p := fe.receive()
	for p.op == opCreditUpdate {
		p = fe.receive()
	}
	if p.op != opReset || p.srcPort != g.hostPort {
		t.Errorf("after an overrun: %+v, want a reset", p.packetHeader)
	}
}

// expectClosed expects the shutdown of a client that has closed. It may arrive as two packets, one
// for each half.
func (g *guestSocket) expectClosed() {
	g.fe.t.Helper()
	p := g.expect(opShutdown)
	if p.flags == shutdownSend {
		p = g.expect(opShutdown)
	}
	if p.flags != shutdownBoth {
		g.fe.t.Fatalf("shutdown flags\n got %d\nwant %d", p.flags, shutdownBoth)
	}
}

func TestClientHalfCloseReachesTheGuest(t *testing.T) {
	_, _, c, g := connected(t)
	c.Write([]byte("last"))
	c.CloseWrite()
	if got := g.expect(opData).payload; string(got) != "last" {
		t.Errorf("before the end\n got %q\nwant %q", got, "last")
	}
	if got := g.expect(opShutdown).flags; got != shutdownSend {
		t.Errorf("shutdown flags\n got %d\nwant %d", got, shutdownSend)
	}
	g.send(opData, 0, []byte("answer"))
	if got := readN(t, c, 6); string(got) != "answer" {
		t.Errorf("after the half-close\n got %q\nwant %q", got, "answer")
	}
	c.Close()
	g.expectClosed()
}

func TestGuestHalfCloseReachesTheClient(t *testing.T) {
	_, _, c, g := connected(t)
	g.send(opData, 0, []byte("last"))
	g.send(opShutdown, shutdownSend, nil)
	wantEnd(t, c, "last")
	c.Write([]byte("answer"))
	if got := g.expect(opData).payload; string(got) != "answer" {
		t.Errorf("after the half-close\n got %q\nwant %q", got, "answer")
	}
	c.Close()
	g.expectClosed()
}

func TestGuestHalfCloseWaitsForASlowClient(t *testing.T) {
	_, _, c, g := connected(t)
	data := g.burst()
	g.send(opShutdown, shutdownSend, nil)
	wantEnd(t, c, string(data))
}

// TestBufferStaysAsLargeAsWhatItHolds: a client that reads a little at a time must not make the
// buffer grow.
func TestBufferStaysAsLargeAsWhatItHolds(t *testing.T) {
	var b buffer
	chunk := segments{make([]byte, 1000)}
	b.push(chunk)
	for range 1000 {
		b.push(chunk)
		b.pop(1000)
	}
	if got, limit := cap(b.bytes), 8000; got > limit {
		t.Errorf("memory for 1000 bytes\n got %d\nwant at most %d", got, limit)
	}
	if b.pop(1000); b.bytes != nil {
		t.Error("an empty buffer holds memory")
	}
}

func TestGuestThatReceivesNoMoreBreaksTheClientsPipe(t *testing.T) {
	_, _, c, g := connected(t)
	g.send(opShutdown, shutdownReceive, nil)
	if _, err := c.Write([]byte("x")); !errors.Is(err, unix.EPIPE) {
		t.Errorf("write\n got %v\nwant %v", err, unix.EPIPE)
	}
	g.send(opData, 0, []byte("still sending"))
	readN(t, c, len("still sending"))
}

func TestGuestCloseDeliversWhatItSentAndIsConfirmed(t *testing.T) {
	_, fe, c, g := connected(t)
	// The data exceeds the buffer of the client's socket. The rest is buffered, while the guest
	// gets its reset at once.
	data := g.burst()
	g.send(opShutdown, shutdownBoth, nil)
	p := fe.receive()
	for p.op == opCreditUpdate {
		p = fe.receive()
	}
	if p.op != opReset {
		t.Fatalf("operation\n got %d\nwant %d", p.op, opReset)
	}
	wantEnd(t, c, string(data))
}

func TestGuestResetClosesTheClient(t *testing.T) {
	_, _, c, g := connected(t)
	g.send(opReset, 0, nil)
	wantEnd(t, c, "")
	g.send(opData, 0, []byte("late"))
	g.expect(opReset)
}

func TestClosedClientIsShutDownThenReset(t *testing.T) {
	_, _, c, g := connected(t)
	c.Write([]byte("last"))
	c.Close()
	if got := g.expect(opData).payload; string(got) != "last" {
		t.Errorf("before the end\n got %q\nwant %q", got, "last")
	}
	g.expectClosed()
	g.send(opData, 0, []byte("to nobody"))
	g.expect(opReset)
}

func TestClientThatLeavesBytesUnreadIsReset(t *testing.T) {
	_, _, c, g := connected(t)
	g.send(opData, 0, []byte("unread"))
	c.Close()
	g.expect(opReset)
}

func TestClientThatGivesUpConnectingIsReset(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	c := dialClient(t, b, "1024")
	p := fe.expect(opRequest)
	c.Close()
	if got := fe.expect(opReset); got.srcPort != p.srcPort {
		t.Errorf("reset of port\n got %d\nwant %d", got.srcPort, p.srcPort)
	}
}

func TestViolationsResetOnlyTheirConnection(t *testing.T) {
	b, fe, good, h := connected(t)
	for name, violate := range map[string]func(*guestSocket){
		"socket type": func(g *guestSocket) { p := g.header(opData); p.typ = 2; fe.transmit(p, nil) },
		"longer than its buffers": func(g *guestSocket) {
			p := g.header(opData)
			p.length = 100
			fe.transmit(p, make([]byte, 99))
		},
		"longer than a packet may be": func(g *guestSocket) {
			p := g.header(opData)
			p.length = maxPacketPayload + 1
			fe.transmit(p, make([]byte, maxPacketPayload+1))
		},
		"largest length":          func(g *guestSocket) { p := g.header(opData); p.length = 1<<32 - 1; fe.transmit(p, nil) },
		"operation 0":             func(g *guestSocket) { g.send(0, 0, nil) },
		"operation 8":             func(g *guestSocket) { g.send(8, 0, nil) },
		"second request":          func(g *guestSocket) { g.send(opRequest, 0, nil) },
		"second response":         func(g *guestSocket) { g.send(opResponse, 0, nil) },
		"data after a half-close": func(g *guestSocket) { g.send(opShutdown, shutdownSend, nil); g.send(opData, 0, []byte("x")) },
	} {
		t.Run(name, func(t *testing.T) {
			c, g := connect(t, b, fe, roomy)
			violate(g)
			g.expect(opReset)
			wantEnd(t, c, "")
		})
	}
	h.send(opData, 0, []byte("unharmed"))
	readN(t, good, len("unharmed"))
}

func TestDataBeforeTheResponseIsReset(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	c := dialClient(t, b, "1024")
	p := fe.expect(opRequest)
	g := &guestSocket{fe: fe, guestPort: p.dstPort, hostPort: p.srcPort, bufAlloc: roomy}
	g.send(opData, 0, []byte("x"))
	g.expect(opReset)
	wantEnd(t, c, "")
}

func TestPacketsFitTheGuestsBuffers(t *testing.T) {
	b, _ := startBackend(t)
	fe := connectFrontEnd(t, b)
	fe.startQueues()
	// The header is split across both descriptors, and 100 bytes are left.
	const first, second = 10, packetHeaderSize - 10 + 100
	for slot := range slots {
		clear(fe.rx.slot(slot))
		fe.rx.give(slot, first, second)
	}
	c := dialClient(t, b, "1024")
	next := func() packet {
		slot, written := fe.rx.take()
		if written > first+second {
			t.Fatalf("%d bytes written to a buffer of %d", written, first+second)
		}
		p := fe.decode(slot, written)
		if tail := fe.rx.slot(slot)[first+second:]; !bytes.Equal(tail, make([]byte, len(tail))) {
			t.Fatal("bytes written behind the buffer")
		}
		fe.rx.give(slot, first, second)
		return p
	}
	p := next()
	g := &guestSocket{fe: fe, guestPort: p.dstPort, hostPort: p.srcPort, bufAlloc: roomy}
	g.send(opResponse, 0, nil)
	want := randomBytes(10 * slots * 104)
	c.Write(want)
	var got []byte
	for len(got) < len(want) {
		got = append(got, next().payload...)
	}
	if !bytes.Equal(got, want) {
		t.Error("the guest got other bytes")
	}
}

func TestGuestWithoutReceiveBuffersIsWaitedFor(t *testing.T) {
	b, _ := startBackend(t)
	fe := connectFrontEnd(t, b)
	fe.startQueues()
	for range 3 {
		dialClient(t, b, "1024")
	}
	// Chains arrive one by one, and each needs a kick to be noticed.
	for slot := range 3 {
		fe.rx.give(slot, packetHeaderSize, 64)
		if p := fe.decode(fe.rx.take()); p.op != opRequest {
			t.Fatalf("operation\n got %d\nwant %d", p.op, opRequest)
		}
	}
}

// TestFullQueueInOneTurnLosesNoKick: a turn ends after as many chains as the queue is long, before
// the device has seen that there are no more.
func TestFullQueueInOneTurnLosesNoKick(t *testing.T) {
	_, fe, c, g := connected(t)
	fe.stopQueues()
	h := g.header(opCreditUpdate)
	h.encode((*[packetHeaderSize]byte)(fe.tx.slot(0)))
	for i := range uint16(queueSize) {
		fe.tx.writeDesc(i, fe.tx.slotGuest(0), packetHeaderSize, 0, 0)
		fe.tx.offer(i)
	}
	fe.startQueues()
	for range queueSize {
		fe.tx.take()
	}
	g.send(opData, 0, []byte("seen"))
	readN(t, c, 4)
}

func TestConnectionsAreLimited(t *testing.T) {
	p, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	m := newMux(p, testCID, silentLog())
	for i := range uint32(maxConnections) {
		m.conns[firstHostPort+i] = &connection{fd: -1}
	}
	ours, theirs := socketPair(t)
	m.add(ours)
	if got, want := len(m.conns), maxConnections; got != want {
		t.Errorf("connections\n got %d\nwant %d", got, want)
	}
	if n, err := unix.Read(theirs, make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("the client over the limit read %d, %v; want the end", n, err)
	}
}

// Serve must return an error, unless QEMU stopped the device before.
func TestQEMUGoneClosesClientsAndIsSaid(t *testing.T) {
	for _, want := range []error{ErrFrontEndGone, nil} {
		b, served := startBackend(t)
		fe := bootGuest(t, b)
		c, _ := connect(t, b, fe, roomy)
		if want == nil {
			fe.stopQueues()
		}
		fe.conn.Close()
		wantServed(t, served, want)
		wantEnd(t, c, "")
		wantMissing(t, b.cfg.Socket, b.cfg.UDSPath)
	}
}

func TestCloseEndsServe(t *testing.T) {
	b, served := startBackend(t)
	fe := bootGuest(t, b)
	c, _ := connect(t, b, fe, roomy)
	b.Close()
	b.Close()
	wantServed(t, served, nil)
	wantEnd(t, c, "")
	if err := b.Serve(context.Background()); err == nil {
		t.Error("Serve after Close returned nil, want an error")
	}
}

func TestContextEndsServe(t *testing.T) {
	dir := t.TempDir()
	b, err := Listen(Config{Socket: dir + "/q", UDSPath: dir + "/c", GuestCID: testCID})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- b.Serve(ctx) }()
	cancel()
	wantServed(t, served, nil)
	wantMissing(t, b.cfg.Socket, b.cfg.UDSPath)
}

func TestCloseWithoutServeRemovesSockets(t *testing.T) {
	dir := t.TempDir()
	b, err := Listen(Config{Socket: dir + "/q", UDSPath: dir + "/c", GuestCID: testCID})
	if err != nil {
		t.Fatal(err)
	}
	b.Close()
	wantMissing(t, b.cfg.Socket, b.cfg.UDSPath)
}

func TestProbeOfTheSocketIsNoFrontEnd(t *testing.T) {
	b, _ := startBackend(t)
	probe := dialFrontEnd(t, b)
	probe.conn.Close()
	// The backend may notice the end of the probe only after the next connect.
	for deadline := time.Now().Add(patience); ; {
		fe := dialFrontEnd(t, b)
		fe.conn.Write(encodeRequest(reqGetFeatures, 0, nil))
		if n, _ := fe.conn.Read(make([]byte, 64)); n > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no front end was served after a probe")
		}
	}
}

func TestPausedMachineKeepsItsConnections(t *testing.T) {
	_, fe, c, g := connected(t)
	rx, tx := fe.stopQueues()
	if rx != uint32(fe.rx.lastUsed) || tx != uint32(fe.tx.lastUsed) {
		t.Errorf("bases\n got %d, %d\nwant %d, %d", rx, tx, fe.rx.lastUsed, fe.tx.lastUsed)
	}
	c.Write([]byte("meanwhile"))
	fe.startQueues()
	if got := g.expect(opData).payload; string(got) != "meanwhile" {
		t.Errorf("after the pause\n got %q\nwant %q", got, "meanwhile")
	}
}

func TestRestartedGuestHasNoConnections(t *testing.T) {
	b, fe, c, _ := connected(t)
	fe.restart()
	wantEnd(t, c, "")
	connect(t, b, fe, roomy)
}

func TestMemoryIsReplacedWhileQueuesRun(t *testing.T) {
	_, fe, c, g := connected(t)
	fe.shareMemory()
	c.Write([]byte("moved"))
	if got := g.expect(opData).payload; string(got) != "moved" {
		t.Errorf("in the new memory\n got %q\nwant %q", got, "moved")
	}
}

func TestResetEndsConnections(t *testing.T) {
	_, fe, c, _ := connected(t)
	fe.send(reqResetOwner, nil)
	wantEnd(t, c, "")
}

func TestMessageCutShortIsAnError(t *testing.T) {
	b, served := startBackend(t)
	fe := connectFrontEnd(t, b)
	fe.conn.Write(encodeRequest(reqSetFeatures, 0, uint64Reply(0))[:messageHeaderSize+3])
	fe.conn.Close()
	wantServed(t, served, io.ErrUnexpectedEOF)
}

func TestNoDescriptorIsLeftOpen(t *testing.T) {
	before := openFiles(t)
	t.Run("session", func(t *testing.T) {
		b, served := startBackend(t)
		fe := bootGuest(t, b)
		connect(t, b, fe, roomy)
		dialClient(t, b, "not a port")
		fe.shareMemory()
		fe.stopQueues()
		fe.startQueues()
		// These descriptors come with a message that is refused.
		fe.post(99, flagNeedReply, nil, fe.memfd, fe.memfd)
		refusal(fe)
		if err := <-served; err == nil {
			t.Error("Serve returned nil, want an error")
		}
	})
	t.Run("message cut short", func(t *testing.T) {
		b, served := startBackend(t)
		fe := dialFrontEnd(t, b)
		fe.conn.WriteMsgUnix([]byte{byte(reqSetMemTable)}, unix.UnixRights(fe.memfd), nil)
		fe.conn.Close()
		wantServed(t, served, io.ErrUnexpectedEOF)
	})
	if after := openFiles(t); after != before {
		t.Errorf("open files\n got %d\nwant %d", after, before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// TestCreditComesBackInLargePieces: a guest whose writer waits for credit sends as much as it may.
// If it got credit for each packet that the client read, it would keep sending packets of that
// size, and would wake a thread for each.
func TestCreditComesBackInLargePieces(t *testing.T) {
	_, fe, c, g := connected(t)
	const piece = 4096
	told := uint32(0)
	for taken := uint32(piece); taken < 2*bufAlloc; taken += piece {
		g.send(opData, 0, make([]byte, piece))
		readN(t, c, piece)
		c.Write([]byte("a packet that says what was taken"))
		p := fe.receive()
		for p.op == opCreditUpdate {
			told = p.fwdCnt
			p = fe.receive()
		}
		if p.op != opData || p.fwdCnt != told && p.fwdCnt-told < creditStep {
			t.Fatalf("after %d bytes\nwant data, and %d taken or %d more\ngot  operation %d, %d taken", taken, told, creditStep, p.op, p.fwdCnt)
		}
		told = p.fwdCnt
		if untold := taken - told; untold > creditStep {
			t.Fatalf("after %d bytes\nwant at most %d untold\ngot  %d", taken, creditStep, untold)
		}
	}
	g.send(opData, 0, make([]byte, piece))
	readN(t, c, piece)
	g.send(opCreditRequest, 0, nil)
	if got, want := g.expect(opCreditUpdate).fwdCnt, uint32(2*bufAlloc); got != want {
		t.Errorf("asked, it says that were taken\nwant %d\ngot  %d", want, got)
	}
}

// Due credit goes with the next packet, whatever its kind, and in no packet of its own afterwards.
// A guest that waits for credit (Linux reads it in virtio_transport_recv_pkt) must get it there.
func TestDueCreditGoesWithPacketsOfEveryKind(t *testing.T) {
	for _, next := range []struct {
		op    operation
		cause func(e *endedConnection)
	}{
		{opData, func(e *endedConnection) { unix.Write(e.client, []byte("data")) }},
		{opShutdown, func(e *endedConnection) { unix.Shutdown(e.client, unix.SHUT_WR) }},
		{opCreditRequest, func(e *endedConnection) { e.b.mux.conns[e.hostPort].debts |= oweCreditRequest }},
		{opCreditUpdate, func(*endedConnection) {}},
	} {
		e := establish(t, unserved(t, failingLog(t)))
		e.guest(opData, 0, make([]byte, bufAlloc))
		next.cause(e)
		if given := e.settle(); len(given) != 1 || given[0].op != next.op || given[0].fwdCnt != bufAlloc {
			t.Errorf("after %d bytes from the guest\nwant one packet of kind %d with their credit\ngot  %+v", bufAlloc, next.op, given)
		}
		unix.Close(e.client)
	}
}
