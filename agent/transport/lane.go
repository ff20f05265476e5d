package transport

import (
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// lane is one server's view of a connection: a net.Conn that delivers the bytes of the calls that
// are routed to the server, and takes their answers. The calls have the stream ids that numbering
// gives them: the ids in one lane increase, with gaps.
//
//	a frame is not taken   nothing behind it is read, whosever it is
//	a server closes it     the connection ends, for all servers; a later Write fails
//	a server writes a      the connection ends
//	frame that is too long
type lane struct {
	*conn
	up    chan []byte // frames for the server
	taken []byte      // the rest of the last chunk of up, which the server has not read yet

	begun   []byte    // of a frame that the server is writing
	writing stopwatch // runs while an answer is written
	closing sync.Once
}

// Read delivers the frames that are not answered in place to the server.
func (l *lane) Read(p []byte) (int, error) {
	if len(l.taken) == 0 {
		select {
		case l.taken = <-l.up:
		case <-l.ended:
			return 0, io.EOF
		}
	}
	n := copy(p, l.taken)
	l.taken = l.taken[n:]
	return n, nil
}

// Write takes the server's frames in pieces of any length, and writes whole frames to the socket.
func (l *lane) Write(p []byte) (int, error) {
	c := l.conn
	if !c.hold() {
		return 0, &net.OpError{Op: "write", Net: c.remote.Network(), Addr: c.remote, Err: net.ErrClosed}
	}
	defer c.release()
	l.begun = append(l.begun, p...)
	for len(l.begun) >= ttrpcframe.HeaderBytes {
		header := ttrpcframe.ParseHeader(l.begun)
		length := ttrpcframe.HeaderBytes + uint64(header.Length)
		if header.Length > ttrpcframe.MaxLength {
			id, _ := c.numbering.idOf(header.StreamID, false)
			l.begun = nil
			l.end()
			return 0, fmt.Errorf("an answer of %d bytes on the peer's stream %d: a frame has at most %d", header.Length, id, ttrpcframe.MaxLength)
		}
		if uint64(len(l.begun)) < length {
			break
		}
		if err := l.answer(l.begun[:length], header); err != nil {
			return 0, err
		}
		l.begun = append(l.begun[:0], l.begun[length:]...)
	}
	return len(p), nil
}

// answer sends a frame of the server to the peer.
func (l *lane) answer(frame []byte, header ttrpcframe.Header) error {
	c := l.conn
	number, ends := header.StreamID, header.EndsCall()
	id, ok := c.numbering.idOf(number, ends)
	if !ok {
		return nil
	}
	setStream(frame, id)
	if ends {
		c.tickets.answered(number)
	}
	l.writing.start()
	err := c.send(frame)
	l.writing.stop()
	if err == nil && ends {
		c.room.ledger.give(&c.account, number)
		c.room.pending.answered(c)
	}
	return err
}

// Close ends the connection. The file descriptor stays open until the last reader or writer is
// done, so that its number is not reused too early.
func (l *lane) Close() error {
	l.closing.Do(func() {
		l.end()
		l.release()
	})
	return nil
}

// deliver passes a piece of a frame to the server. It returns false if the connection is over.
func (l *lane) deliver(chunk []byte) bool {
	if len(chunk) == 0 {
		return true
	}
	select {
	case l.up <- chunk:
		return true
	case <-l.over:
		return false
	}
}

// Route sends certain calls to another server.
type Route struct {
	// Has reports whether a call belongs to the route, by its service and method alone. If a frame
	// is longer than 320 KiB, these names are looked for in its first 4 KiB.
	Has func(*ttrpcframe.Request) bool

	// Serve answers these calls of one connection, through a net.Conn that carries no others, and
	// closes it. It is called in a new goroutine at the first such call.
	Serve func(net.Conn)
}

// lanes are the lanes of a connection: first leads to Accept's server. Each other lane is opened at
// the first call of its route.
type lanes struct {
	first  lane
	mu     sync.Mutex
	others map[int]*lane // by the index of the route
}

// stuck reports whether a server has been writing an answer for too long.
func (l *lanes) stuck() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, other := range l.others {
		if other.writing.shows(patience) {
			return true
		}
	}
	return l.first.writing.shows(patience)
}

// laneOf returns the lane for a call, given the first pieces of its frame.
func (c *conn) laneOf(pieces [][]byte) *lane {
	if len(c.room.routes) == 0 {
		return &c.lanes.first
	}
	var names []byte
	for _, p := range pieces {
		names = append(names, p[:min(len(p), bufferBytes-len(names))]...)
	}
	request, _ := ttrpcframe.ParseRequest(names[ttrpcframe.HeaderBytes:]) // parses as much as is there of a partial frame
	for i, route := range c.room.routes {
		if route.Has(&request) {
			return c.open(i, route)
		}
	}
	return &c.lanes.first
}

// open returns a route's lane, and opens it at the first call.
func (c *conn) open(number int, route Route) *lane {
	c.lanes.mu.Lock()
	defer c.lanes.mu.Unlock()
	l := c.lanes.others[number]
	if l == nil {
		l = &lane{conn: c, up: make(chan []byte)}
		if c.lanes.others == nil {
			c.lanes.others = map[int]*lane{}
		}
		c.lanes.others[number] = l
		c.users.Add(1) // in addition to the loop, which has called open
		go route.Serve(l)
	}
	return l
}
