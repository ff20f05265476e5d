package transport

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/frame"
)

// Quick answers a call at once, or says that it will not: then the call goes up
// to the server as it is. It must not block; where it does all the same, the call
// goes up after a while, before anything behind it, and what Quick answers then
// goes nowhere. The request lies in a buffer that is the connection's, and is Quick's
// until it returns. The response is the payload of a successful answer.
type Quick func(request *frame.Request) (response []byte, ok bool)

const (
	// quickBytes is the longest frame that is looked at.
	quickBytes = 1 << 10

	// bufferBytes is what one read takes in.
	bufferBytes = 4 << 10

	// yieldEvery is after how many quick calls the reading goroutine yields:
	// often enough that it does not run for the 10 ms after which the runtime
	// would preempt it (forcePreemptNS in runtime/proc.go).
	yieldEvery = 16

	// leastTimeout is the least time-out of a call that is answered in place: a
	// shorter one is for the server to keep.
	leastTimeout = 100 * time.Millisecond

	// sendLimit ends a connection whose peer does not read.
	sendLimit = 30 * time.Second
)

// conn is a connection whose quick calls are answered by the goroutine that
// reads them, with one write, on a socket that blocks: a thread that waits in
// read(2) is woken by the kernel alone, where Go's poller would be asked to
// epoll, to hand over and to wake. All other frames go up to ttrpc's server,
// which takes it for an ordinary net.Conn.
type conn struct {
	fd            int
	local, remote net.Addr
	quick         Quick
	onClose       func()
	owed          *owed
	owes          int // to the peer; owed.mu guards it

	up    chan []byte   // to the server
	ended chan struct{} // closed when nothing more is read
	rest  []byte        // of the last of up, which the server has not taken yet
	over  chan struct{}
	once  sync.Once

	writing sync.Mutex // one frame at a time
	pending []byte     // of a frame that the server has begun to write

	users    atomic.Int32  // who uses fd; the last one closes it
	sequence atomic.Uint64 // odd while a quick call runs; see watch
	watched  atomic.Bool
	loop     *loop // the one that reads; it may be replaced while sequence is odd
}

func newConn(fd int, local, remote net.Addr, quick Quick, owed *owed, onClose func()) *conn {
	c := &conn{fd: fd, local: local, remote: remote, quick: quick, owed: owed, onClose: onClose, up: make(chan []byte), ended: make(chan struct{}), over: make(chan struct{})}
	c.users.Store(1)
	limit := unix.NsecToTimeval(int64(sendLimit))
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit) // where it cannot be set, a write waits
	c.start(&loop{conn: c, buffer: make([]byte, bufferBytes)})
	return c
}

func (c *conn) start(l *loop) {
	c.users.Add(1)
	c.loop = l
	go func() {
		defer c.release()
		l.run()
	}()
}

func (c *conn) release() {
	if c.users.Add(-1) == 0 {
		unix.Close(c.fd)
		c.owed.left(c)
		c.onClose()
	}
}

// Read hands the server the frames that are not answered in place.
func (c *conn) Read(p []byte) (int, error) {
	if len(c.rest) == 0 {
		select {
		case c.rest = <-c.up:
		case <-c.ended:
			return 0, io.EOF
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Write takes the server's frames, in pieces of any length, and writes whole
// ones.
func (c *conn) Write(p []byte) (int, error) {
	c.pending = append(c.pending, p...)
	for len(c.pending) >= frame.HeaderBytes {
		header := frame.ParseHeader(c.pending)
		length := frame.HeaderBytes + uint64(header.Length)
		if uint64(len(c.pending)) < length {
			break
		}
		if err := c.send(c.pending[:length]); err != nil {
			return 0, err
		}
		if header.Type == frame.TypeResponse {
			c.owed.answered(c)
		}
		c.pending = append(c.pending[:0], c.pending[length:]...)
	}
	return len(p), nil
}

// send writes a frame. One that could not be written whole ends the connection.
func (c *conn) send(b []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	for len(b) > 0 {
		n, err := unix.Write(c.fd, b)
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

// Close ends the connection. The descriptor stays until the last one that reads
// or writes has left, so that its number is never another's.
func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.over)
		unix.Shutdown(c.fd, unix.SHUT_RDWR)
		c.release()
	})
	return nil
}

// LocalAddr is the address that was listened on.
func (c *conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the peer's.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// Deadlines are the server's business: it sets none.
func (c *conn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (c *conn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (c *conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

// loop reads a connection. It is its goroutine's alone; while a quick call runs,
// whoever moves the connection's sequence on owns what is behind that call.
type loop struct {
	conn       *conn
	buffer     []byte
	start, end int    // of what was read and not used
	answer     []byte // scratch
	quick      int    // calls that were answered in place
	asked      []byte // the call that is being answered in place
	hung       []byte // the call that the loop before this one is at, which goes up first
}

func (l *loop) run() {
	if l.hung != nil {
		l.conn.owed.took(l.conn)
		l.deliver(l.hung)
	}
	for {
		taken, err := l.frame()
		if taken {
			return // by the watch: another goroutine reads on
		}
		if err != nil {
			l.pass(l.end - l.start) // half a frame is the server's to complain of
			close(l.conn.ended)
			return
		}
	}
}

// frame deals with one frame. taken means that the loop was replaced meanwhile.
func (l *loop) frame() (taken bool, err error) {
	if err := l.fill(frame.HeaderBytes); err != nil {
		return false, err
	}
	header := frame.ParseHeader(l.buffer[l.start:])
	length := frame.HeaderBytes + uint64(header.Length)
	if header.Type != frame.TypeRequest || header.StreamID%2 == 0 {
		return false, l.passAll(length)
	}
	if length > quickBytes {
		return false, l.passRequest(length)
	}
	if err := l.fill(int(length)); err != nil {
		return false, err
	}
	whole := l.buffer[l.start : l.start+int(length)]
	request, err := frame.ParseRequest(whole[frame.HeaderBytes:])
	if err != nil || request.HasMetadata || request.TimeoutNano != 0 && request.TimeoutNano < int64(leastTimeout) {
		return false, l.passRequest(length)
	}
	return l.inPlace(whole, header.StreamID, &request)
}

// inPlace tries to answer a request here.
func (l *loop) inPlace(whole []byte, id uint32, request *frame.Request) (taken bool, err error) {
	c := l.conn
	c.watch()
	l.start += len(whole)
	l.asked = whole
	odd := c.sequence.Add(1)
	response, ok := c.quick(request)
	if !c.sequence.CompareAndSwap(odd, odd+1) {
		return true, nil // the server has the call by now
	}
	if ok {
		l.answer = frame.AppendResponse(l.answer[:0], id, response)
		err := c.send(l.answer)
		// Else the runtime takes this goroutine, which waits in system calls
		// alone, for one that has run for too long, and wakes up fifty thousand
		// times a second to preempt it. Each yield costs a wake-up too: not always.
		if l.quick++; l.quick%yieldEvery == 0 {
			runtime.Gosched()
		}
		return false, err
	}
	l.start -= len(whole)
	return false, l.passRequest(uint64(len(whole)))
}

// passRequest is passAll for a frame that the server is to answer.
func (l *loop) passRequest(length uint64) error {
	l.conn.owed.took(l.conn)
	return l.passAll(length)
}

// fill reads until the buffer holds n bytes, which it has room for.
func (l *loop) fill(n int) error {
	for l.end-l.start < n {
		if l.start+n > len(l.buffer) {
			l.end = copy(l.buffer, l.buffer[l.start:l.end])
			l.start = 0
		}
		if l.start == l.end {
			l.start, l.end = 0, 0
		}
		got, err := l.conn.receive(l.buffer[l.end:])
		if err != nil {
			return err
		}
		l.end += got
	}
	return nil
}

func (c *conn) receive(p []byte) (int, error) {
	for {
		n, err := unix.Read(c.fd, p)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// passAll hands the server a frame of a length that the peer claims, piece by
// piece as it comes.
func (l *loop) passAll(length uint64) error {
	for length > 0 {
		if l.start == l.end {
			if err := l.fill(1); err != nil {
				return err
			}
		}
		n := int(min(length, uint64(l.end-l.start)))
		if !l.pass(n) {
			return net.ErrClosed
		}
		length -= uint64(n)
	}
	runtime.Gosched() // the server's turn, before this thread waits for the peer
	return nil
}

// pass hands the server the next n bytes of the buffer.
func (l *loop) pass(n int) bool {
	chunk := append([]byte(nil), l.buffer[l.start:l.start+n]...)
	l.start += n
	return l.deliver(chunk)
}

func (l *loop) deliver(chunk []byte) bool {
	if len(chunk) == 0 {
		return true
	}
	select {
	case l.conn.up <- chunk:
		return true
	case <-l.conn.over:
		return false
	}
}
