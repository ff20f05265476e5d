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

// Quick answers a call at once, or says that it will not: then the call goes up
// to the server as it is. While it runs, what comes behind its call is not read; where it
// takes longer than some tens of milliseconds the call goes up, before anything behind it
// and with the time that is left, and what Quick answers then goes nowhere. So a call that
// changes something must be one that may be made twice. The request lies in a buffer that is the connection's, and is Quick's
// until it returns. The response is the payload of a successful answer.
type Quick func(request *ttrpcframe.Request) (response []byte, ok bool)

const (
	// quickBytes is the longest frame that is looked at.
	quickBytes = 1 << 10

	// bufferBytes is what one read takes in, and pieceBytes what it does of a long frame.
	bufferBytes, pieceBytes = 4 << 10, 64 << 10

	// heldBytes is how much may be on its way from a peer that has gone: what the
	// kernel here keeps, and what a vsock backend does.
	heldBytes = socketBytes + 256<<10

	// yieldEvery is after how many quick calls the reading goroutine yields:
	// often enough that it does not run for the 10 ms after which the runtime
	// would preempt it (forcePreemptNS in runtime/proc.go).
	yieldEvery = 16

	// leastTimeout is the least time-out of a call that is answered in place: a
	// shorter one is for the server to keep.
	leastTimeout = 100 * time.Millisecond

	// sendLimit ends a connection whose peer does not read, sooner or later: patience
	// does where others wait.
	sendLimit = 30 * time.Second
)

// conn is a connection whose quick calls are answered by the goroutine that
// reads them, with one write, on a socket that blocks: a thread that waits in
// read(2) is woken by the kernel alone, where Go's poller would be asked to
// epoll, to hand over and to wake. All other frames go up to ttrpc's server,
// which takes the first lane for an ordinary net.Conn,
// or to a route's server.
type conn struct {
	fd            int
	local, remote net.Addr
	quick         Quick
	onClose       func()
	room          *room
	pending       int     // to the peer; pending.mu guards it
	account       account // of memory; ledger.mu guards it
	tickets       tickets // of its calls

	lanes lanes         // to the servers
	ended chan struct{} // closed when nothing more is read
	over  chan struct{}

	ending  sync.Once
	sending sync.Mutex // one frame at a time

	users    atomic.Int32  // who uses fd; the last one closes it
	sequence atomic.Uint64 // odd while a quick call runs; see watch
	watched  atomic.Bool
	loop     *loop  // the one that reads; it may be replaced while sequence is odd
	last     uint32 // stream of a call; the loop's

	used    atomic.Uint64 // when, as room.uses counts it
	reading stopwatch     // a frame that memory is lent for
}

// newConn makes a connection of a socket, which it closes in the end, and calls onClose.
// It returns the first lane. Its error is that there is no place for it; the socket stays the caller's then.
func newConn(fd int, local, remote net.Addr, quick Quick, room *room, onClose func()) (*lane, error) {
	c := &conn{fd: fd, local: local, remote: remote, quick: quick, room: room, onClose: onClose, ended: make(chan struct{}), over: make(chan struct{})}
	c.lanes.first = lane{conn: c, up: make(chan []byte)}
	c.tickets.order = room.order
	c.use()
	if err := room.admit(c); err != nil {
		return nil, err
	}
	c.users.Store(2) // the server and who reads
	limit := unix.NsecToTimeval(int64(sendLimit))
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit) // where it cannot be set, a write waits
	c.start(&loop{conn: c, buffer: make([]byte, bufferBytes)})
	return &c.lanes.first, nil
}

// use notes that the connection is used.
func (c *conn) use() { c.used.Store(c.room.uses.Add(1)) }

// stuck reports whether the connection makes others wait for too long.
func (c *conn) stuck() bool { return c.reading.shows(patience) || c.lanes.stuck() }

// start has a goroutine read on, in the place of the one before it. That one is done with
// the connection, however long its quick call hangs.
func (c *conn) start(l *loop) {
	c.loop = l
	go func() {
		if replaced := l.run(); !replaced {
			c.release()
		}
	}()
}

func (c *conn) release() {
	if c.users.Add(-1) == 0 {
		unix.Close(c.fd)
		c.room.left(c)
		c.onClose()
	}
}

// send writes a frame. One that could not be written whole ends the connection.
func (c *conn) send(b []byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	var slow stopwatch
	for len(b) > 0 {
		n, err := unix.Write(c.fd, b)
		if err == nil && n < len(b) && !slow.start() && slow.shows(sendLimit) {
			err = unix.ETIMEDOUT // a little at a time
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

// end has who reads or writes find the connection's end; the server closes it then.
func (c *conn) end() {
	c.ending.Do(func() {
		close(c.over)
		unix.Shutdown(c.fd, unix.SHUT_RDWR)
	})
}

// LocalAddr is the address that was listened on.
func (c *conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the peer's.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// Deadlines are the server's business: it sets none.
func (c *conn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (c *conn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (c *conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
