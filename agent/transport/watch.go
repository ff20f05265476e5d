package transport

import (
	"bytes"
	"time"

	"github.com/directvol/directvol/protocols/ttrpcframe"
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
		go c.watchLoop(time.Now())
	}
}

// watchLoop looks until all is quiet. A call that runs already has begun after begun.
func (c *conn) watchLoop(begun time.Time) {
	look := time.NewTicker(watchInterval)
	defer look.Stop()
	last, quiet := c.sequence.Load(), 0
	changed, looked := begun, begun // the last look before the sequence was as it is, and the last one
	for {
		select {
		case <-c.over:
			return
		case <-look.C:
		}
		at, now := time.Now(), c.sequence.Load()
		switch {
		case now != last:
			last, quiet, changed = now, 0, looked
		case now%2 == 1:
			c.takeOver(now, time.Since(changed))
		default:
			quiet++
		}
		looked = at
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
// that does), so it cannot wait for the old one to decline it. Its time is shorter by what
// has passed of it, which is took at most.
func (c *conn) takeOver(odd uint64, took time.Duration) {
	old := c.loop
	if !c.sequence.CompareAndSwap(odd, odd+1) {
		return
	}
	// The call still reads its request from the old buffer.
	l := &loop{conn: c, buffer: make([]byte, bufferBytes), hung: shortened(old.asked, took)}
	l.end = copy(l.buffer, old.buffer[old.start:old.end])
	c.start(l)
}

// shortened returns a copy of a call's frame whose time-out, where it has one, is shorter by
// took. It stays above 0, which is none.
func shortened(whole []byte, took time.Duration) []byte {
	request, err := ttrpcframe.ParseRequest(whole[ttrpcframe.HeaderBytes:])
	if err != nil || request.TimeoutNano <= 0 {
		return bytes.Clone(whole)
	}
	return ttrpcframe.WithTimeout(whole, max(1, request.TimeoutNano-int64(took)))
}
