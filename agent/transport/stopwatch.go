package transport

import (
	"sync/atomic"
	"time"
)

// stopwatch measures how long an activity has been running. One goroutine runs it, others may read
// it.
type stopwatch struct{ began atomic.Int64 } // 0 while stopped

// zero is the origin of all stopwatches.
var zero = time.Now().Add(-1)

// start starts the stopwatch, and returns false if it is running already.
func (s *stopwatch) start() bool { return s.began.CompareAndSwap(0, int64(time.Since(zero))) }

func (s *stopwatch) stop() { s.began.Store(0) }

// shows reports whether the stopwatch has been running for longer than d.
func (s *stopwatch) shows(d time.Duration) bool {
	began := s.began.Load()
	return began != 0 && time.Since(zero)-time.Duration(began) > d
}

// runs reports whether the stopwatch is running.
func (s *stopwatch) runs() bool { return s.began.Load() != 0 }
