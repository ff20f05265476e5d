package vhostvsock

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestThousandConnectionsAtOnce(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	type pair struct {
		c *net.UnixConn
		g *guestSocket
	}
	files, goroutines := openFiles(t), runtime.NumGoroutine()
	var pairs []pair
	for range 1000 {
		c, g := connect(t, b, fe, roomy)
		pairs = append(pairs, pair{c, g})
	}
	for i, p := range pairs {
		want := []byte{byte(i), byte(i >> 8)}
		p.c.Write(want)
		if got := p.g.expect(opData).payload; !bytes.Equal(got, want) {
			t.Fatalf("connection %d: the guest got %v", i, got)
		}
		p.g.send(opData, 0, want)
		if got := readN(t, p.c, 2); !bytes.Equal(got, want) {
			t.Fatalf("connection %d: the client got %v", i, got)
		}
	}
	for _, p := range pairs {
		p.c.Close()
		p.g.expectClosed()
	}
	// When the last packet has been seen, all descriptors are closed, because a connection's
	// descriptor is closed before its last packet is sent.
	if got := openFiles(t); got != files {
		t.Errorf("open files\n got %d\nwant %d", got, files)
	}
	if got := runtime.NumGoroutine(); got != goroutines {
		t.Errorf("goroutines\n got %d\nwant %d", got, goroutines)
	}
}

// ending is a way in which an established connection ends. Afterwards nothing of the connection may
// be left.
type ending struct {
	name string
	end  func(*endedConnection)
}

// endedConnection has both ends of a connection of an unserved backend.
type endedConnection struct {
	t        *testing.T
	b        *Backend
	client   int // closed by the ending or after it
	hostPort uint32
}

func (e *endedConnection) guest(op operation, flags uint32, payload []byte) {
	h := packetHeader{
		srcCID: testCID, dstCID: hostCID, srcPort: 1024, dstPort: e.hostPort,
		typ: typeStream, op: op, flags: flags, length: uint32(len(payload)), bufAlloc: roomy,
	}
	var head [packetHeaderSize]byte
	h.encode(&head)
	e.b.mux.receive(segments{head[:], payload})
}

// establish connects a client to the guest.
func establish(t *testing.T, b *Backend) *endedConnection {
	t.Helper()
	e := begin(t, b)
	e.ask()
	e.guest(opResponse, 0, nil)
	if c := b.mux.conns[e.hostPort]; c == nil || c.state != established {
		t.Fatalf("the connection is not established: %+v", c)
	}
	return e
}

// begin adds a client that has not sent its first line yet.
func begin(t *testing.T, b *Backend) *endedConnection {
	t.Helper()
	ours, theirs, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	e := &endedConnection{t: t, b: b, client: theirs, hostPort: b.mux.nextPort}
	b.mux.add(ours)
	return e
}

// settle handles the clients' events and gives the guest all waiting packets, which it returns.
func (e *endedConnection) settle() (given []packetHeader) {
	e.t.Helper()
	events, err := e.b.poll.wait(0)
	if err != nil {
		e.t.Fatal(err)
	}
	for i := range events {
		e.b.dispatch(&events[i])
	}
	var head [packetHeaderSize]byte
	room := segments{head[:], make([]byte, 4096)}
	for e.b.mux.waiting() {
		if e.b.mux.fill(room) > 0 {
			given = append(given, decodePacketHeader(&head))
		}
	}
	return given
}

func (e *endedConnection) closeClient() {
	unix.Close(e.client)
	e.client = -1
	e.settle()
}

var endings = []ending{
	{"client closes", (*endedConnection).closeClient},
	{"client closes with bytes unread", func(e *endedConnection) { e.guest(opData, 0, []byte("unread")); e.closeClient() }},
	{"client closes with bytes unsent", func(e *endedConnection) { unix.Write(e.client, make([]byte, 100)); e.closeClient() }},
	{"client half-closes, guest closes", func(e *endedConnection) {
		unix.Shutdown(e.client, unix.SHUT_WR)
		e.settle()
		e.guest(opShutdown, shutdownBoth, nil)
	}},
	{"guest half-closes, client closes", func(e *endedConnection) { e.guest(opShutdown, shutdownSend, nil); e.closeClient() }},
	{"guest closes", func(e *endedConnection) { e.guest(opShutdown, shutdownBoth, nil) }},
	{"guest closes with bytes unread", func(e *endedConnection) {
		for range 4 {
			e.guest(opData, 0, make([]byte, maxPacketPayload))
		}
		e.guest(opShutdown, shutdownBoth, nil)
		e.settle()
		e.closeClient()
	}},
	{"guest resets", func(e *endedConnection) { e.guest(opReset, 0, nil) }},
	{"guest breaks the protocol", func(e *endedConnection) { e.guest(99, 0, nil) }},
	{"guest restarts", func(e *endedConnection) { e.b.mux.guestRestarted() }},
	{"guest breaks a queue", func(e *endedConnection) { e.b.mux.guestBroken(); e.b.mux.guestRestarted() }},
}

// beginnings are client connections that never become established.
var beginnings = []ending{
	{"no line", (*endedConnection).closeClient},
	{"no such port", func(e *endedConnection) { unix.Write(e.client, []byte("CONNECT x\n")) }},
	{"nobody listens", func(e *endedConnection) { e.ask(); e.guest(opReset, 0, nil) }},
	{"client gives up", func(e *endedConnection) { e.ask(); e.closeClient() }},
	{"client gives up before the guest was asked", func(e *endedConnection) {
		unix.Write(e.client, []byte("CONNECT 1024\n"))
		e.closeClient()
	}},
}

func (e *endedConnection) ask() {
	unix.Write(e.client, []byte("CONNECT 1024\n"))
	e.settle()
}

// TestTenThousandConnectionsLeaveNothing opens and closes connections in every way.
func TestTenThousandConnectionsLeaveNothing(t *testing.T) {
	b := unserved(t, silentLog())
	files := openFiles(t)
	for i := range 10_000 {
		turn := i % (len(endings) + len(beginnings))
		var e *endedConnection
		var way ending
		if turn < len(endings) {
			e, way = establish(t, b), endings[turn]
		} else {
			e, way = begin(t, b), beginnings[turn-len(endings)]
		}
		way.end(e)
		e.settle()
		if e.client >= 0 {
			unix.Close(e.client)
		}
		if c := b.mux.conns[e.hostPort]; c != nil || len(b.mux.conns) != 0 || len(b.mux.ready) != 0 || len(b.mux.strays) != 0 {
			t.Fatalf("after %q: %+v is left, of %d; %d in line, %d resets", way.name, c, len(b.mux.conns), len(b.mux.ready), len(b.mux.strays))
		}
	}
	if got := openFiles(t); got != files {
		t.Errorf("open files\n got %d\nwant %d", got, files)
	}
}

func pair() (ours, theirs int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	return fds[0], fds[1], err
}

func TestSlowGuestSocketStallsOnlyItself(t *testing.T) {
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	data := randomBytes(1 << 20)
	stalled, g := connect(t, b, fe, 1000) // room for 1000 bytes, which nothing reads
	written := make(chan error, 1)
	go func() {
		_, err := stalled.Write(data)
		written <- err
	}()
	var got []byte
	for len(got) < 1000 {
		got = append(got, g.expect(opData).payload...)
	}
	g.expect(opCreditRequest)
	for range 100 {
		quick, h := connect(t, b, fe, roomy)
		quick.Write([]byte("ping"))
		if p := h.expect(opData).payload; string(p) != "ping" {
			t.Fatalf("beside a slow guest\n got %q\nwant %q", p, "ping")
		}
		h.send(opShutdown, shutdownBoth, nil)
		h.expect(opReset)
		wantEnd(t, quick, "")
	}
	g.bufAlloc = 2 << 20
	g.send(opCreditUpdate, 0, nil)
	for len(got) < len(data) {
		got = append(got, g.expect(opData).payload...)
	}
	if err := <-written; err != nil || !bytes.Equal(got, data) {
		t.Errorf("the guest got other bytes, or the client failed: %v", err)
	}
}

// TestBulkBothWaysAtOnceIsIntact ends with a half-close on each side.
func TestBulkBothWaysAtOnceIsIntact(t *testing.T) {
	const size = 8 << 20
	b, _ := startBackend(t)
	fe := bootGuest(t, b)
	c, g := connect(t, b, fe, 256<<10)
	up, down := randomBytes(size), bytes.Repeat(randomBytes(1<<20), size>>20)
	go func() {
		c.Write(down)
		c.CloseWrite()
	}()
	received := make(chan []byte, 1)
	go func() {
		got, _ := io.ReadAll(c)
		received <- got
	}()
	var sent, fwd uint32
	var got []byte
	// Send a packet for each received one, so that both directions always have data in flight.
	for ended := false; !ended || len(up) > 0; {
		if n := min(30_000, len(up), int(bufAlloc-(sent-fwd))); n > 0 {
			g.fwdCnt = uint32(len(got))
			g.send(opData, 0, up[:n])
			up, sent = up[n:], sent+uint32(n)
			if !fe.rx.returned() {
				continue
			}
		}
		p := fe.receive()
		fwd = p.fwdCnt // in packets of every kind: due credit is not sent again
		switch p.op {
		case opData:
			got = append(got, p.payload...)
		case opShutdown:
			ended = true
		case opCreditRequest:
			g.fwdCnt = uint32(len(got))
			g.send(opCreditUpdate, 0, nil)
		case opCreditUpdate:
		default:
			t.Fatalf("unexpected packet: %+v", p.packetHeader)
		}
	}
	g.send(opShutdown, shutdownSend, nil)
	if !bytes.Equal(got, down) {
		t.Errorf("the guest got %d other bytes", len(got))
	}
	if back := <-received; !bytes.Equal(back, randomBytes(size)) {
		t.Errorf("the client got %d other bytes", len(back))
	}
}
