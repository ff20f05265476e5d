package transport

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// loop reads a connection. Only its own goroutine uses it. While a quick call runs, whoever wins
// the CAS on the connection's sequence owns the bytes after that call.
type loop struct {
	conn       *conn
	buffer     []byte
	start, end int    // of the bytes that were read and not yet used
	answer     []byte // scratch
	quick      int    // number of calls answered in place
	asked      []byte // the call that is being answered in place
	hung       []byte // the hanging call of the loop that this one has replaced; it goes to the server first
}

// run reads until the connection ends or the loop is replaced.
func (l *loop) run() (replaced bool) {
	if l.hung != nil && l.passHung() != nil {
		close(l.conn.ended)
		return false
	}
	for {
		taken, err := l.frame()
		if taken {
			return true // by the watch: another goroutine continues to read
		}
		if err != nil {
			close(l.conn.ended)
			return false
		}
	}
}

// passHung passes the hanging call to a server. The call counts as pending already.
func (l *loop) passHung() error {
	header := ttrpcframe.ParseHeader(l.hung)
	err := l.conn.take(&header)
	l.conn.room.pending.answered(l.conn)
	if err != nil {
		return err
	}
	setStream(l.hung, header.StreamID)
	return l.handUp(l.conn.laneOf([][]byte{l.hung}), [][]byte{l.hung}, true)
}

// frame processes one frame. taken means that the loop was replaced meanwhile.
func (l *loop) frame() (taken bool, err error) {
	if err := l.fill(ttrpcframe.HeaderBytes); err != nil {
		return false, err
	}
	l.conn.use()
	header := ttrpcframe.ParseHeader(l.buffer[l.start:])
	length := ttrpcframe.HeaderBytes + uint64(header.Length)
	if refused, err := l.refuse(header); refused {
		return false, err
	}
	l.conn.last = max(l.conn.last, header.StreamID)
	if length > quickBytes {
		return false, l.passRequest(header)
	}
	if err := l.fill(int(length)); err != nil {
		return false, err
	}
	whole := l.buffer[l.start : l.start+int(length)]
	request, err := ttrpcframe.ParseRequest(whole[ttrpcframe.HeaderBytes:])
	if err != nil || request.HasMetadata || request.TimeoutNano != 0 && request.TimeoutNano < int64(leastTimeout) {
		return false, l.passRequest(header)
	}
	return l.inPlace(whole, header, &request)
}

// inPlace tries to answer a request in this goroutine.
func (l *loop) inPlace(whole []byte, header ttrpcframe.Header, request *ttrpcframe.Request) (taken bool, err error) {
	c := l.conn
	c.watch()
	l.start += len(whole)
	l.asked = whole
	c.room.pending.took(c)
	odd := c.sequence.Add(1)
	response, ok := c.quick(request)
	if !c.sequence.CompareAndSwap(odd, odd+1) {
		return true, nil // the server has the call now, and its answer is pending
	}
	defer c.room.pending.answered(c)
	if ok {
		l.answer = ttrpcframe.AppendResponse(l.answer[:0], header.StreamID, response)
		c.answering.start()
		err := c.send(l.answer)
		c.answering.stop()
		// Without a yield, the runtime mistakes this goroutine, which only makes system calls, for
		// one that has run for too long. It would then wake up fifty thousand times a second to
		// preempt it. Each yield also costs a wake-up, so not every call yields.
		if l.quick++; l.quick%yieldEvery == 0 {
			runtime.Gosched()
		}
		return false, err
	}
	l.start -= len(whole)
	return false, l.passRequest(header)
}

// take waits until there is memory for a call, and gives it the number that it has in its server.
// The call's answer is pending from then on.
func (c *conn) take(header *ttrpcframe.Header) (err error) {
	if header.StreamID, err = c.numbering.begin(header.StreamID); err != nil {
		c.room.warn("the connection from %v ends: %v", c.remote, err)
		return err
	}
	if !c.room.ledger.take(&c.account, header.StreamID, costOf(header.Length), c.over) {
		return net.ErrClosed
	}
	c.room.pending.took(c)
	return nil
}

// passRequest passes a call to a server piece by piece as it arrives, once there is memory for it.
// It starts when all bytes are here that could still arrive from a peer that has gone, so that the
// server does not allocate memory for a frame that never arrives.
func (l *loop) passRequest(header ttrpcframe.Header) error {
	if err := l.conn.take(&header); err != nil {
		return err
	}
	l.conn.reading.start()
	defer l.conn.reading.stop()
	length := ttrpcframe.HeaderBytes + int64(header.Length)
	held := min(length, heldBytes)
	if header.Length > ttrpcframe.MaxLength {
		held = ttrpcframe.HeaderBytes // no memory was lent for more
	}
	var pieces [][]byte
	var to *lane // nil until a piece was passed on
	for read := int64(0); read < length; {
		piece, err := l.piece(length - read)
		if err != nil {
			return err
		}
		if read == 0 {
			setStream(piece, header.StreamID)
		}
		pieces, read = append(pieces, piece), read+int64(len(piece))
		if read < held {
			continue
		}
		whole := to == nil && read == length
		if to == nil {
			to = l.conn.laneOf(pieces)
		}
		if err := l.handUp(to, pieces, whole); err != nil {
			return err
		}
		pieces = pieces[:0]
	}
	runtime.Gosched() // let the server run before this thread blocks on the peer
	return nil
}

// handUp passes pieces of a frame to a server; whole means that they are the whole frame.
func (l *loop) handUp(to *lane, pieces [][]byte, whole bool) error {
	if whole {
		all, err := l.conn.ticketed(bytes.Join(pieces, nil))
		if err != nil {
			return err
		}
		pieces = [][]byte{all}
	}
	for _, p := range pieces {
		if !to.deliver(p) {
			return net.ErrClosed
		}
	}
	return nil
}

// piece returns the next bytes of a frame, no more than most: the rest of the buffer, or the result
// of one read.
func (l *loop) piece(most int64) ([]byte, error) {
	if n := min(most, int64(l.end-l.start)); n > 0 {
		l.start += int(n)
		return bytes.Clone(l.buffer[l.start-int(n) : l.start]), nil
	}
	piece := make([]byte, min(most, pieceBytes))
	n, err := l.conn.receive(piece)
	return piece[:n], err
}

// refuse answers and skips a frame that is not a valid call, because the server would keep it. The
// server has no streams, and data for a call makes ttrpc v1.2.10 panic. The texts are ttrpc's where
// ttrpc refuses such a frame too.
func (l *loop) refuse(header ttrpcframe.Header) (refused bool, err error) {
	var text string
	switch {
	case header.StreamID%2 == 0:
		text = "StreamID must be odd for client initiated streams"
	case header.Type == ttrpcframe.TypeData:
		text = "StreamID is no longer active"
	case header.Type != ttrpcframe.TypeRequest:
	case header.StreamID <= l.conn.last && l.conn.numbering.inUse(header.StreamID):
		text = "StreamID cannot be re-used while its call is in progress"
	default:
		return false, nil
	}
	err = l.skip(ttrpcframe.HeaderBytes + uint64(header.Length))
	if err == nil && text != "" {
		l.answer = ttrpcframe.AppendError(l.answer[:0], header.StreamID, codes.InvalidArgument, text)
		err = l.conn.send(l.answer)
	}
	return true, err
}

// fill reads until the buffer holds n bytes. n must not exceed the buffer's size.
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

// skip skips a frame with the length that the peer claims.
func (l *loop) skip(length uint64) error {
	for length > 0 {
		if l.start == l.end {
			if err := l.fill(1); err != nil {
				return err
			}
		}
		n := min(length, uint64(l.end-l.start))
		l.start += int(n)
		length -= n
	}
	return nil
}
