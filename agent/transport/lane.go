package transport

import (
	"io"
	"net"
	"sync"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// lane is what one server sees of a connection: the frames of the calls that are routed to it, byte
// by byte as they came, and room for their answers. It is a net.Conn. Streams have the ids that the
// peer gave them, so those of one lane have gaps.
//
//	a frame is not taken   nothing behind it is read, whosever it is
//	a server closes it     the connection ends, for all servers
type lane struct {
	*conn
	up    chan []byte // to the server
	taken []byte      // of the last of up, which the server has not read yet

	begun   []byte    // of a frame that the server has begun to write
	writing stopwatch // an answer
	closing sync.Once
}

// Read hands the server the frames that are not answered in place.
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

// Write takes the server's frames, in pieces of any length, and writes whole
// ones.
func (l *lane) Write(p []byte) (int, error) {
	c := l.conn
	l.begun = append(l.begun, p...)
	for len(l.begun) >= ttrpcframe.HeaderBytes {
		header := ttrpcframe.ParseHeader(l.begun)
		length := ttrpcframe.HeaderBytes + uint64(header.Length)
		if uint64(len(l.begun)) < length {
			break
		}
		if header.Type == ttrpcframe.TypeResponse {
			c.tickets.answered(header.StreamID)
		}
		l.writing.start()
		err := c.send(l.begun[:length])
		l.writing.stop()
		if err != nil {
			return 0, err
		}
		if header.Type == ttrpcframe.TypeResponse {
			c.room.ledger.give(&c.account, header.StreamID)
			c.room.pending.answered(c)
		}
		l.begun = append(l.begun[:0], l.begun[length:]...)
	}
	return len(p), nil
}

// Close ends the connection. The descriptor stays until the last one that reads
// or writes has left, so that its number is never another's.
func (l *lane) Close() error {
	l.closing.Do(func() {
		l.end()
		l.release()
	})
	return nil
}

// deliver hands the server a piece of a frame. false means that the connection is over.
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

// Route gives calls to a server of its own.
type Route struct {
	// Has reports whether a call is the route's, by its service and method alone. Where a frame is
	// longer than 320 KiB, they are looked for in its first 4 KiB.
	Has func(*ttrpcframe.Request) bool

	// Serve answers what one connection carries of these calls, as on a connection that has no
	// others, and closes it. It has a goroutine of its own, from the first call on.
	Serve func(net.Conn)
}

// lanes are those of a connection: the first one is that of Accept's server, and each other one is
// opened for its route's first call.
type lanes struct {
	first  lane
	mu     sync.Mutex
	others map[int]*lane // by the route's number
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

// laneOf returns the lane of the route that has a call, of whose frame pieces are here.
func (c *conn) laneOf(pieces [][]byte) *lane {
	if len(c.room.routes) == 0 {
		return &c.lanes.first
	}
	var names []byte
	for _, p := range pieces {
		names = append(names, p[:min(len(p), bufferBytes-len(names))]...)
	}
	request, _ := ttrpcframe.ParseRequest(names[ttrpcframe.HeaderBytes:]) // of a part of a frame, what is in it
	for i, route := range c.room.routes {
		if route.Has(&request) {
			return c.open(i, route)
		}
	}
	return &c.lanes.first
}

// open returns a route's lane.
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
		c.users.Add(1) // beside the loop, which asks for it
		go route.Serve(l)
	}
	return l
}
