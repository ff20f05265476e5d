package transport

import (
	"bytes"
	"time"

	"github.com/directvol/directvol/protocols/ttrpcframe"
)

const (
	// watchInterval is how often a connection's quick calls are checked: a call that is the same at
	// two checks hangs.
	watchInterval = 50 * time.Millisecond

	// watchRounds is the number of checks without a call after which a watch ends.
	watchRounds = 20
)

// watch starts a goroutine that keeps a hanging quick call from blocking the connection. It runs
// only around traffic, so that an idle agent has no timer.
func (c *conn) watch() {
	if !c.watched.Load() && c.watched.CompareAndSwap(false, true) {
		go c.watchLoop(time.Now())
	}
}

// watchLoop checks until there is no traffic. A call that is already running has begun after begun.
func (c *conn) watchLoop(begun time.Time) {
	look := time.NewTicker(watchInterval)
	defer look.Stop()
	last, quiet := c.sequence.Load(), 0
	changed, looked := begun, begun // changed: the last check before the sequence changed; looked: the last check
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

// takeOver makes a new goroutine read the connection, unless the call has just ended. First it
// passes the call to the server: calls keep their order, so the call cannot wait until Quick
// declines it. The call's time-out is reduced by the time that has passed, at most took.
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

// shortened returns a copy of a call's frame with its time-out, if there is one, reduced by took.
// The time-out stays above 0, because 0 means none.
func shortened(whole []byte, took time.Duration) []byte {
	request, err := ttrpcframe.ParseRequest(whole[ttrpcframe.HeaderBytes:])
	if err != nil || request.TimeoutNano <= 0 {
		return bytes.Clone(whole)
	}
	return ttrpcframe.WithTimeout(whole, max(1, request.TimeoutNano-int64(took)))
}
