package logbuffer

import (
	"context"
	"net"
	"slices"
	"sync"
)

// MaxReaders is how many connections may read at once. A further connection replaces the oldest
// one, because readers that are gone are noticed only when something is written to them, and must
// not keep others out.
const MaxReaders = 4

// Serve lets each connection that l accepts read the buffer, until l fails or is closed, or ctx
// ends; then Serve closes all connections. It ignores what a connection sends.
func (j *Buffer) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	var s seats
	defer s.clear()
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		reading, stop := context.WithCancel(ctx)
		seat := &seat{conn: conn, stop: stop}
		s.take(seat)
		go func() {
			// An error ends this reader and does not matter to the log.
			_ = j.Reader().CopyTo(reading, conn)
			s.leave(seat)
		}()
	}
}

// seat is the place of one reader.
type seat struct {
	conn net.Conn
	stop context.CancelFunc
}

// end closes the connection, which also ends a write that hangs.
func (s *seat) end() {
	s.stop()
	s.conn.Close()
}

// seats are the places of the readers, oldest first.
type seats struct {
	mu    sync.Mutex
	taken []*seat
}

func (s *seats) take(one *seat) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.taken) == MaxReaders {
		s.taken[0].end()
		s.taken = s.taken[1:]
	}
	s.taken = append(s.taken, one)
}

func (s *seats) leave(one *seat) {
	s.mu.Lock()
	defer s.mu.Unlock()
	one.end()
	s.taken = slices.DeleteFunc(s.taken, func(other *seat) bool { return other == one })
}

func (s *seats) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.taken {
		one.end()
	}
}
