package transport

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// small returns a room with places for two connections.
func small() *room { return newRoom(bounds{conns: 2, lent: least, lentToOne: least}) }

// joined returns a connection in a room, and its peer. No call is answered in place.
func joined(t *testing.T, r *room) (*lane, net.Conn, error) {
	t.Helper()
	return joinedWith(t, r, func(*ttrpcframe.Request) ([]byte, bool) { return nil, false })
}

func joinedWith(t *testing.T, r *room, quick Quick) (*lane, net.Conn, error) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c, err := newConn(pair[0], addr{"unix", "here"}, addr{"unix", "there"}, quick, r, func() {})
	if err != nil {
		unix.Close(pair[0])
		unix.Close(pair[1])
		return nil, nil, err
	}
	file := os.NewFile(uintptr(pair[1]), "peer")
	defer file.Close()
	peer, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close(); c.Close() })
	return c, peer, nil
}

func mustJoin(t *testing.T, r *room) (*lane, net.Conn) {
	t.Helper()
	c, peer, err := joined(t, r)
	if err != nil {
		t.Fatal(err)
	}
	return c, peer
}

// isEnded waits until the connection's server and its peer see the end.
func isEnded(t *testing.T, c *lane, peer net.Conn) {
	t.Helper()
	if err := peer.SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Error(err)
	}
	c.Close()
	if _, err := io.Copy(io.Discard, peer); err != nil {
		t.Errorf("want the connection's end\ngot  %v", err)
	}
}

// sendCall sends a call, and waits until the server has it.
func sendCall(t *testing.T, c *lane, peer net.Conn, stream uint32) {
	t.Helper()
	if _, err := peer.Write(asked(stream)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, ttrpcframe.HeaderBytes)); err != nil {
		t.Fatal(err)
	}
	for c.reading.runs() {
		runtime.Gosched()
	}
}

// awaitReading waits until a connection has memory for a frame that stays incomplete.
func awaitReading(c *lane) {
	for !c.reading.runs() {
		runtime.Gosched()
	}
}

func answer(t *testing.T, c *lane, stream uint32) {
	t.Helper()
	if _, err := c.Write(ttrpcframe.AppendResponse(nil, stream, nil)); err != nil {
		t.Fatal(err)
	}
}

func TestLongestIdleConnectionGivesWay(t *testing.T) {
	r := small()
	first, firstPeer := mustJoin(t, r)
	second, secondPeer := mustJoin(t, r)
	sendCall(t, first, firstPeer, 1)
	answer(t, first, 1) // used later than the second
	third, thirdPeer := mustJoin(t, r)
	isEnded(t, second, secondPeer)
	sendCall(t, first, firstPeer, 3)
	sendCall(t, third, thirdPeer, 1)
	if _, _, err := joined(t, r); err == nil {
		t.Error("a connection was admitted though all others have calls")
	}
	answer(t, third, 1)
	if r.ledger.mu.Lock(); third.account.inUse != 0 || first.account.inUse == 0 {
		t.Errorf("in use\nwant nothing of the connection that was answered, and something of the other\ngot  %d and %d", third.account.inUse, first.account.inUse)
	}
	r.ledger.mu.Unlock()
	mustJoin(t, r)
	isEnded(t, third, thirdPeer)
	answer(t, first, 3)
}

// A connection with an incomplete frame keeps its place only for a while.
func TestStuckConnectionGivesWay(t *testing.T) {
	r := small()
	stuck, stuckPeer := mustJoin(t, r)
	_, _ = mustJoin(t, r)
	header := ttrpcframe.Header{Length: 1 << 20, StreamID: 1, Type: ttrpcframe.TypeRequest}
	if _, err := stuckPeer.Write(header.Append(nil)); err != nil {
		t.Fatal(err)
	}
	awaitReading(stuck)
	_, _ = mustJoin(t, r) // in place of the other one, which is younger and has no call
	if stuck.stuck() {
		t.Skip("this machine took longer than patience to get here, so there is nothing to see: run it again")
	}
	stuck.reading.began.Add(-int64(2 * patience))
	_, _ = mustJoin(t, r)
	isEnded(t, stuck, stuckPeer)
}

// A connection whose frame waits for memory is not read. It gets the memory when the connection
// that has it is stuck.
func TestStuckConnectionLosesMemoryThatOthersWaitFor(t *testing.T) {
	r := small()
	stuck, stuckPeer := mustJoin(t, r)
	header := ttrpcframe.Header{Length: ttrpcframe.MaxLength, StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil)
	if _, err := stuckPeer.Write(header); err != nil {
		t.Fatal(err)
	}
	awaitReading(stuck)
	next, nextPeer := mustJoin(t, r)
	if _, err := nextPeer.Write(header); err != nil {
		t.Fatal(err)
	}
	for n := 0; n == 0; { // until it waits
		r.ledger.mu.Lock()
		n = len(r.ledger.waiting)
		r.ledger.mu.Unlock()
	}
	stuck.reading.began.Add(-int64(2 * patience))
	isEnded(t, stuck, stuckPeer)
	awaitReading(next)
}

// A peer that has hung up while it waited for memory gets none, because the server would allocate
// memory for a frame that never arrives.
func TestPeerThatHungUpGetsNoMemory(t *testing.T) {
	r := small()
	first, firstPeer := mustJoin(t, r)
	header := ttrpcframe.Header{Length: ttrpcframe.MaxLength, StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil)
	next, nextPeer := mustJoin(t, r)
	for _, peer := range []net.Conn{firstPeer, nextPeer} {
		if _, err := peer.Write(header); err != nil {
			t.Fatal(err)
		}
		if peer == firstPeer {
			awaitReading(first)
		}
	}
	for n := 0; n == 0; {
		r.ledger.mu.Lock()
		n = len(r.ledger.waiting)
		r.ledger.mu.Unlock()
	}
	nextPeer.Close()
	firstPeer.Close()
	if _, err := io.Copy(io.Discard, first); err != nil {
		t.Error(err)
	}
	first.Close()
	if up, err := io.ReadAll(next); len(up) > 0 || err != nil {
		t.Errorf("want the connection's end\ngot  %d bytes, error %v", len(up), err)
	}
}

// A peer that does not read the answer of a quick call keeps its place only for a while.
func TestPeerThatDoesNotReadAQuickAnswerGivesWay(t *testing.T) {
	r := newRoom(bounds{conns: 1, lent: least, lentToOne: least})
	long := make([]byte, ttrpcframe.MaxLength/2) // more than a socket buffers
	c, peer, err := joinedWith(t, r, func(*ttrpcframe.Request) ([]byte, bool) { return long, true })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Write(asked(1)); err != nil {
		t.Fatal(err)
	}
	for !c.answering.runs() {
		runtime.Gosched()
	}
	c.answering.began.Add(-int64(2 * patience))
	_, _ = mustJoin(t, r)
	isEnded(t, c, peer)
}

// A peer that does not read its answer keeps its place, and the memory of its call, only for a
// while.
func TestPeerThatDoesNotReadGivesWay(t *testing.T) {
	r := small()
	c, peer := mustJoin(t, r)
	_, _ = mustJoin(t, r)
	sendCall(t, c, peer, 1)
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(ttrpcframe.AppendResponse(nil, 1, make([]byte, ttrpcframe.MaxLength/2))) // more than a socket buffers
		wrote <- err
	}()
	for !c.writing.runs() {
		runtime.Gosched()
	}
	_, _ = mustJoin(t, r) // in place of the other one, which has no call
	c.writing.began.Add(-int64(2 * patience))
	_, _ = mustJoin(t, r)
	if err := <-wrote; err == nil {
		t.Error("the answer was written")
	}
	c.Close()
	inUse := func() int64 {
		r.ledger.mu.Lock()
		defer r.ledger.mu.Unlock()
		return c.account.inUse
	}
	for inUse() != 0 { // until the last reader is done
		runtime.Gosched()
	}
}

// A peer that does not read its answers loses its connection even if nobody waits for its place:
// when it reads nothing, by the socket's own limit, and when it reads a little, by the stopwatch.
func TestPeerThatNeverReadsLosesItsConnection(t *testing.T) {
	c, peer := mustJoin(t, small())
	limit, err := unix.GetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO)
	if err != nil || time.Duration(limit.Nano()) != sendLimit {
		t.Errorf("the socket's limit\nwant %v\ngot  %v, error %v", sendLimit, time.Duration(limit.Nano()), err)
	}
	short := unix.NsecToTimeval(int64(10 * time.Millisecond))
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &short); err != nil {
		t.Fatal(err)
	}
	if err := c.send(make([]byte, ttrpcframe.MaxLength)); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("a peer that reads nothing\nwant EAGAIN\ngot  %v", err)
	}
	isEnded(t, c, peer)
}
