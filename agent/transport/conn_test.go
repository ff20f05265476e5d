package transport

import (
	"bytes"
	"encoding/binary"
	"io"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// hungPair returns a connection whose quick calls hang until release is closed, and then decline.
func hungPair(t *testing.T) (c *lane, peer int, release chan struct{}, closed chan struct{}) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	release, closed = make(chan struct{}), make(chan struct{})
	decline := func(*ttrpcframe.Request) ([]byte, bool) {
		<-release
		return nil, false
	}
	r := newRoom(boundsOf(1 << 30))
	r.order = someOrder()
	c, err = newConn(pair[0], addr{"unix", "here"}, addr{"unix", "there"}, decline, r, func() { close(closed) })
	if err != nil {
		t.Fatal(err)
	}
	return c, pair[1], release, closed
}

func asked(id uint32) []byte {
	return ttrpcframe.Header{StreamID: id, Type: ttrpcframe.TypeRequest}.Append(nil)
}

// A filesystem may answer after the caller has gone, and with an error.
func TestHungQuickCallReachesTheServerAfterItsPeerLeft(t *testing.T) {
	c, peer, release, closed := hungPair(t)
	if _, err := unix.Write(peer, asked(1)); err != nil {
		t.Fatal(err)
	}
	unix.Close(peer)
	if up, err := io.ReadAll(c); err != nil || !bytes.Equal(up, asked(1)) { // reads to the end, which another goroutine has read
		t.Errorf("want the call to go up\ngot  %x, error %v", up, err)
	}
	close(release)
	c.Close()
	<-closed
}

// Calls keep their order, also those that hang.
func TestHungCallsReachTheServerInOrderAndOnce(t *testing.T) {
	c, peer, release, closed := hungPair(t)
	var want []byte
	for id := uint32(1); id < 10; id += 2 { // each hangs and is taken over
		want = append(want, asked(id)...)
	}
	large := append(ttrpcframe.Header{Length: quickBytes, StreamID: 11, Type: ttrpcframe.TypeRequest}.Append(nil), make([]byte, quickBytes)...)
	want = append(want, large...) // too long for a quick call
	go unix.Write(peer, want)
	up := make([]byte, len(want))
	if _, err := io.ReadFull(c, up); err != nil || !bytes.Equal(up, want) {
		t.Errorf("up\nwant %x\ngot  %x, error %v", slices.Clip(want[:60]), up[:60], err)
	}
	close(release)
	unix.Close(peer)
	if more, err := io.ReadAll(c); err != nil || len(more) > 0 {
		t.Errorf("when the calls have declined\nwant nothing more to go up\ngot  %x, error %v", more, err)
	}
	c.Close()
	<-closed
}

// A hanging quick call no longer holds its connection: what the connection had is released when the
// connection ends, and not when the filesystem answers. Otherwise a call with a ticket that its
// server has not begun would block all others until then.
func TestConnectionThatEndsDuringAHungCallFreesItsMemory(t *testing.T) {
	c, peer, release, closed := hungPair(t)
	defer close(release)
	create := requestFrame(t, "CreateContainer", 10)
	binary.BigEndian.PutUint32(create[4:], 3) // its stream
	if _, err := unix.Write(peer, append(asked(1), create...)); err != nil {
		t.Fatal(err)
	}
	var up []byte
	for piece := make([]byte, 4096); len(up) <= ttrpcframe.HeaderBytes+len(create); {
		n, err := c.Read(piece)
		if err != nil {
			t.Fatal(err)
		}
		up = append(up, piece[:n]...)
	}
	unix.Close(peer)
	if _, err := io.ReadAll(c); err != nil {
		t.Fatal(err)
	}
	c.Close()
	select {
	case <-closed:
	case <-time.After(limit):
		t.Error("its descriptor, place and memory are kept while the call hangs")
	}
	c.tickets.mu.Lock()
	defer c.tickets.mu.Unlock()
	if left := len(c.tickets.byStream); left > 0 {
		t.Errorf("tickets that all other calls wait for\nwant none\ngot  %d", left)
	}
}

// A call's time-out counts from its arrival, and not from the moment when the server gets it.
func TestHungCallReachesTheServerWithItsRemainingTime(t *testing.T) {
	c, peer, release, closed := hungPair(t)
	const timeout = int64(time.Hour)
	began := time.Now()
	if _, err := unix.Write(peer, ttrpcframe.WithTimeout(asked(1), timeout)); err != nil {
		t.Fatal(err)
	}
	up := make([]byte, len(ttrpcframe.WithTimeout(asked(1), timeout))+ttrpcframe.HeaderBytes)
	n, err := c.Read(up)
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	request, err := ttrpcframe.ParseRequest(up[ttrpcframe.HeaderBytes:n])
	if left := request.TimeoutNano; err != nil || left >= timeout-int64(watchInterval)/2 || left < timeout-int64(took) {
		t.Errorf("%v after it came\nwant as much less than an hour, at most\ngot  %v, error %v", took, time.Duration(left), err)
	}
	close(release)
	unix.Close(peer)
	c.Close()
	<-closed
}
