package vhostvsock

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// slotLimit is how long a client may wait in one of the ways of stuck. A call's
	// deadline is long over by then.
	slotLimit = 5 * time.Minute
	// sweepInterval is how often that is looked at.
	sweepInterval = 30 * time.Second

	// sparedFiles are descriptors that clients leave for the front end: its memory,
	// its eventfds, and those that come before the old ones go.
	sparedFiles = 64
)

// mostConnections is how many clients there may be where so many descriptors may.
func mostConnections(files uint64) int {
	if files >= maxConnections+sparedFiles {
		return maxConnections
	}
	return max(1, int(files)-sparedFiles)
}

// progress is what changes where a connection gets anywhere.
type progress struct {
	state     connState
	sent, fwd uint32
}

// sweep takes their slots from clients that have waited too long. While the guest
// stands still (running is false), only who owes a line is waited for in vain.
func (m *mux) sweep(running bool) {
	for _, c := range m.conns {
		now := progress{c.state, c.sent, c.fwd}
		if now != c.moved || !c.stuck() || !running && c.state != greeting {
			c.moved, c.movedAt = now, m.now
			continue
		}
		if m.now-c.movedAt >= slotLimit {
			m.log.Warnf("client of guest port %d is closed: it has waited %v %s", c.guestPort, slotLimit, stuckFor[c.state])
			m.abort(c)
		}
	}
}

// stuckFor says what a connection waits for in a state.
var stuckFor = map[connState]string{
	greeting:    "to say CONNECT",
	connecting:  "for the guest's answer",
	established: "for the guest to take what it has sent",
	draining:    "to read the last that the guest had sent",
}

// stuck says whether a client waits for something that must come soon. That it does
// not read is nothing of that kind while its connection lasts: a log may be looked at
// for hours.
func (c *connection) stuck() bool {
	switch c.state {
	case connecting:
		return c.debts&oweRequest == 0
	case established:
		return c.readable && !c.ended && !c.refused && c.credit() == 0 && unread(c.fd)
	default:
		return c.fd >= 0
	}
}

// unread says whether there is something in a socket.
func unread(fd int) bool {
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	return err == nil && n > 0
}
