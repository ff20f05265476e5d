package transport

import (
	"sync/atomic"
	"time"
)

// stopwatch shows since when something goes on. One goroutine runs it, others may look.
type stopwatch struct{ began atomic.Int64 } // 0 while nothing does

// zero is when all stopwatches begin to count.
var zero = time.Now().Add(-1)

// start begins to count, and returns false where that goes on already.
func (s *stopwatch) start() bool { return s.began.CompareAndSwap(0, int64(time.Since(zero))) }

func (s *stopwatch) stop() { s.began.Store(0) }

// shows reports whether it goes on for longer than d.
func (s *stopwatch) shows(d time.Duration) bool {
	began := s.began.Load()
	return began != 0 && time.Since(zero)-time.Duration(began) > d
}

// runs reports whether it goes on.
func (s *stopwatch) runs() bool { return s.began.Load() != 0 }
