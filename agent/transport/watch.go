package transport

import (
	"bytes"
	"time"
)

const (
	// watchInterval is how often a connection's quick calls are looked at: one
	// that is the same at two looks hangs.
	watchInterval = 50 * time.Millisecond

	// watchRounds is for how many quiet looks a watch goes on.
	watchRounds = 20
)

// watch sees to it that a quick call which hangs does not hang the connection.
// It lives around traffic alone: an idle agent has no timer.
func (c *conn) watch() {
	if !c.watched.Load() && c.watched.CompareAndSwap(false, true) {
		go c.watchLoop()
	}
}

func (c *conn) watchLoop() {
	look := time.NewTicker(watchInterval)
	defer look.Stop()
	last, quiet := c.sequence.Load(), 0
	for {
		select {
		case <-c.over:
			return
		case <-look.C:
		}
		now := c.sequence.Load()
		switch {
		case now != last:
			last, quiet = now, 0
		case now%2 == 1:
			c.takeOver(now)
		default:
			quiet++
		}
		if quiet < watchRounds {
			continue
		}
		c.watched.Store(false)
		if c.sequence.Load() == now || !c.watched.CompareAndSwap(false, true) {
			return
		}
		quiet = 0
	}
}

// takeOver has a new goroutine read on, unless the call has ended just now. First it
// gives the call to the server: the ids of calls must not go down (ttrpc refuses one
// that does), so it cannot wait for the old one to decline it.
func (c *conn) takeOver(odd uint64) {
	old := c.loop
	if !c.sequence.CompareAndSwap(odd, odd+1) {
		return
	}
	// The call still reads its request from the old buffer.
	l := &loop{conn: c, buffer: make([]byte, bufferBytes), hung: bytes.Clone(old.asked)}
	l.end = copy(l.buffer, old.buffer[old.start:old.end])
	c.start(l)
}
