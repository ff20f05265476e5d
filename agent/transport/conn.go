package transport

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// Quick answers a call at once, or declines it: then the call goes to the server unchanged. While
// Quick runs, no later frame of the connection is read. If Quick takes longer than some tens of
// milliseconds, the call goes to the server, before any later frame and with the time that is left,
// and Quick's own answer is dropped. So a call that changes something must be safe to repeat. The
// request is in a buffer of the connection, which Quick may use until it returns. The response is
// the payload of a successful answer.
type Quick func(request *ttrpcframe.Request) (response []byte, ok bool)

const (
	// quickBytes is the longest frame that may be answered by Quick.
	quickBytes = 1 << 10

	// bufferBytes is the size of one read, pieceBytes that of one read of a long frame.
	bufferBytes, pieceBytes = 4 << 10, 64 << 10

	// heldBytes is how much may still arrive from a peer that has gone: the buffers of the kernel
	// here and of a vsock backend.
	heldBytes = socketBytes + 256<<10

	// yieldEvery is the number of quick calls after which the reading goroutine yields: often
	// enough that it does not run for 10 ms, after which the runtime would preempt it
	// (forcePreemptNS in runtime/proc.go).
	yieldEvery = 16

	// leastTimeout is the least time-out of a call that is answered in place; the server handles
	// shorter ones.
	leastTimeout = 100 * time.Millisecond

	// sendLimit is how long a peer may leave an answer unread before its connection is ended. If
	// others wait for the connection's memory or place, patience applies instead.
	sendLimit = 30 * time.Second
)

// conn is a connection whose quick calls are answered by the goroutine that reads them, with one
// write, on a blocking socket. A thread that blocks in read(2) is woken by the kernel alone; with
// Go's poller each call would also need an epoll and a handover to another thread. All other frames
// go to ttrpc's server, which uses the first lane as an ordinary net.Conn, or to a route's server.
type conn struct {
	fd            int
	local, remote net.Addr
	quick         Quick
	onClose       func()
	room          *room
	pending       int     // answers to the peer; guarded by pending.mu
	account       account // of memory; guarded by ledger.mu
	tickets       tickets // of its calls
	numbering     numbering

	lanes lanes         // to the servers
	ended chan struct{} // closed when nothing more is read
	over  chan struct{}

	ending  sync.Once
	sending sync.Mutex // one frame at a time

	users    atomic.Int32  // how many use fd; the last one closes it
	sequence atomic.Uint64 // odd while a quick call runs; see watch
	watched  atomic.Bool
	loop     *loop  // the current reader; may be replaced while sequence is odd
	last     uint32 // the highest stream id of its calls so far; used by the loop only

	used      atomic.Uint64 // time of the last use, as counted by room.uses
	reading   stopwatch     // runs while a frame is read that memory is lent for
	answering stopwatch     // runs while the answer of a quick call is written
}

// newConn makes a connection of a socket and returns its first lane. The connection closes the
// socket in the end and then calls onClose. If there is no place for another connection, newConn
// fails and the caller keeps the socket.
func newConn(fd int, local, remote net.Addr, quick Quick, room *room, onClose func()) (*lane, error) {
	c := &conn{fd: fd, local: local, remote: remote, quick: quick, room: room, onClose: onClose, ended: make(chan struct{}), over: make(chan struct{})}
	c.lanes.first = lane{conn: c, up: make(chan []byte)}
	c.tickets.order = room.order
	c.use()
	if err := room.admit(c); err != nil {
		return nil, err
	}
	c.users.Store(2) // the server and the reader
	limit := unix.NsecToTimeval(int64(sendLimit))
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit) // if it cannot be set, a write blocks
	c.start(&loop{conn: c, buffer: make([]byte, bufferBytes)})
	return &c.lanes.first, nil
}

// use notes that the connection is used now.
func (c *conn) use() { c.used.Store(c.room.uses.Add(1)) }

// stuck reports whether the connection has kept others waiting for too long.
func (c *conn) stuck() bool {
	return c.reading.shows(patience) || c.answering.shows(patience) || c.lanes.stuck()
}

// start starts a goroutine with the loop l, in place of the earlier one, which no longer uses the
// connection however long its quick call hangs.
func (c *conn) start(l *loop) {
	c.loop = l
	go func() {
		if replaced := l.run(); !replaced {
			c.release()
		}
	}()
}

// hold keeps the file descriptor open until release. It returns false if it is closed already, and
// its number may be another file's.
func (c *conn) hold() bool {
	for {
		n := c.users.Load()
		if n == 0 {
			return false
		}
		if c.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (c *conn) release() {
	if c.users.Add(-1) == 0 {
		unix.Close(c.fd)
		c.room.left(c)
		c.onClose()
	}
}

// send writes a frame. If the frame could not be written completely, send ends the connection.
func (c *conn) send(b []byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	var slow stopwatch
	for len(b) > 0 {
		n, err := unix.Write(c.fd, b)
		if err == nil && n < len(b) && !slow.start() && slow.shows(sendLimit) {
			err = unix.ETIMEDOUT // the peer reads only a little at a time
		}
		switch {
		case err == nil:
			b = b[n:]
		case errors.Is(err, unix.EINTR):
		default:
			unix.Shutdown(c.fd, unix.SHUT_RDWR)
			return &net.OpError{Op: "write", Net: c.remote.Network(), Addr: c.remote, Err: os.NewSyscallError("write", err)}
		}
	}
	return nil
}

// end shuts the socket down, so that readers and writers see its end; then the server closes it.
func (c *conn) end() {
	c.ending.Do(func() {
		close(c.over)
		unix.Shutdown(c.fd, unix.SHUT_RDWR)
	})
}

// LocalAddr returns the address of the listener.
func (c *conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the address of the peer.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline and the two methods below fail. The server never calls them.
func (c *conn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (c *conn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (c *conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
