package vhostvsock

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// The queues, by index. QEMU keeps the third queue, for events.
const (
	rxQueue    = 0 // to the guest
	txQueue    = 1 // from the guest
	queueCount = 2
)

// ring is a queue as the front end describes it, with its eventfds, and with its virtqueue while
// the queue is started.
type ring struct {
	num     uint32
	base    uint16
	addr    vringAddr
	hasAddr bool
	enabled bool

	kick, call, err int // eventfds; -1 for none

	queue *virtqueue // nil while stopped
	bad   bool       // the guest broke the queue, which is not served until it is started again
}

func newRing() ring { return ring{kick: -1, call: -1, err: -1} }

// served returns the virtqueue, or nil if it must not be used.
func (r *ring) served() *virtqueue {
	if r.enabled && !r.bad {
		return r.queue
	}
	return nil
}

// start makes the virtqueue from the front end's description.
func (r *ring) start(mem *memory, eventIdx bool) error {
	if mem == nil || !r.hasAddr {
		return errors.New("the queue is started before its memory and addresses are known")
	}
	q, err := newVirtqueue(mem, r.num, r.addr, r.base, eventIdx)
	if err != nil {
		return err
	}
	r.queue = q
	return nil
}

// stop keeps the next avail entry as the base from which the queue can continue.
func (r *ring) stop(p *poller) {
	if r.queue != nil {
		r.base, r.queue = r.queue.nextAvail, nil
	}
	if r.kick >= 0 {
		p.closeFD(r.kick)
		r.kick = -1
	}
}

// close stops the ring and closes its eventfds.
func (r *ring) close(p *poller) {
	r.stop(p)
	closeFDs([]int{r.call, r.err})
	r.call, r.err = -1, -1
}

// fail stops serving a ring that the guest has broken.
func (r *ring) fail() {
	r.bad = true
	signal(r.err)
}

// notify signals completed chains to the guest, if the guest asked for that.
func (r *ring) notify() {
	if r.queue != nil && r.queue.wantsSignal() {
		signal(r.call)
	}
}

// signal adds 1 to an eventfd. Its only possible failure is harmless: a full counter is readable
// already.
func signal(fd int) {
	if fd < 0 {
		return
	}
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	for {
		if _, err := unix.Write(fd, one[:]); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// takeEventFD parses the payload of SET_VRING_KICK, CALL or ERR, and takes the descriptor out of m;
// fd is -1 if there is none.
func takeEventFD(m *message) (index, fd int, err error) {
	v, err := parseUint64(m.payload)
	if err != nil {
		return 0, -1, err
	}
	if v&^0x1ff != 0 || v&0xff >= queueCount {
		return 0, -1, fmt.Errorf("queue %#x, we have %d", v, queueCount)
	}
	index = int(v & 0xff)
	if v&vringNoFD != 0 {
		return index, -1, nil
	}
	if len(m.fds) != 1 {
		return 0, -1, fmt.Errorf("eventfd of queue %d: came with %d descriptors", index, len(m.fds))
	}
	fd, m.fds[0] = m.fds[0], -1
	return index, fd, nil
}
