package vhostvsock

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// slotLimit is how long a client may be stuck (see stuck). Every call's deadline has passed by
	// then.
	slotLimit = 5 * time.Minute
	// sweepInterval is the interval between checks for stuck clients.
	sweepInterval = 30 * time.Second

	// sparedFiles is the number of descriptors that clients must leave for the front end: its
	// memory, its eventfds, and new ones that arrive before the old ones are closed.
	sparedFiles = 64
)

// mostConnections returns the greatest number of clients for the given limit of descriptors.
func mostConnections(files uint64) int {
	if files >= maxConnections+sparedFiles {
		return maxConnections
	}
	return max(1, int(files)-sparedFiles)
}

// progress changes whenever a connection makes progress.
type progress struct {
	state     connState
	sent, fwd uint32
}

// sweep closes the clients that have been stuck too long. While the guest is stopped (running is
// false), only clients that have not sent their first line can be stuck.
func (m *mux) sweep(running bool) {
	for _, c := range m.conns {
		now := progress{c.state, c.sent, c.fwd}
		if now != c.moved || !c.stuck() || !running && c.state != greeting {
			c.moved, c.movedAt = now, m.now
			continue
		}
		if m.now-c.movedAt >= slotLimit {
			m.log.Warnf("client of guest port %d is closed: it has waited for %v %s", c.guestPort, slotLimit, stuckFor[c.state])
			m.abort(c)
		}
	}
}

// stuckFor describes what a stuck connection waits for in each state.
var stuckFor = map[connState]string{
	greeting:    "to say CONNECT",
	connecting:  "for the guest's answer",
	established: "for the guest to take its bytes",
	draining:    "to read the guest's last bytes",
}

// stuck reports whether a client waits for something that should happen soon. A client that does
// not read an open connection is not stuck: somebody may look at a log for hours.
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

// unread reports whether a socket has unread data.
func unread(fd int) bool {
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	return err == nil && n > 0
}
