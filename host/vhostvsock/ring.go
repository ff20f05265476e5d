package vhostvsock

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// The queues, by their index. The third, for events, stays with QEMU.
const (
	rxQueue    = 0 // to the guest
	txQueue    = 1 // from the guest
	queueCount = 2
)

// ring is a queue as the front end sees it: what it has told about it, its
// eventfds, and the virtqueue while it is started.
type ring struct {
	num     uint32
	base    uint16
	addr    vringAddr
	hasAddr bool
	enabled bool

	kick, call, err int // eventfds, -1 for none

	queue *virtqueue // nil while stopped
	bad   bool       // the guest broke it; not served until it is started anew
}

func newRing() ring { return ring{kick: -1, call: -1, err: -1} }

// served is the virtqueue, or nil when it is not to be touched.
func (r *ring) served() *virtqueue {
	if r.enabled && !r.bad {
		return r.queue
	}
	return nil
}

// start makes the virtqueue from what the front end has told.
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

// stop keeps the next avail entry as the base to go on from.
func (r *ring) stop(p *poller) {
	if r.queue != nil {
		r.base, r.queue = r.queue.nextAvail, nil
	}
	if r.kick >= 0 {
		p.closeFD(r.kick)
		r.kick = -1
	}
}

// close stops the ring and gives up its eventfds.
func (r *ring) close(p *poller) {
	r.stop(p)
	closeFDs([]int{r.call, r.err})
	r.call, r.err = -1, -1
}

// fail takes a ring out of service that the guest has broken.
func (r *ring) fail() {
	r.bad = true
	signal(r.err)
}

// notify tells the guest of completed chains, if it wants to know.
func (r *ring) notify() {
	if r.queue != nil && r.queue.wantsSignal() {
		signal(r.call)
	}
}

// signal adds 1 to an eventfd. It cannot fail in a way that matters: a counter
// that is full is readable already.
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

// takeEventFD reads the payload of SET_VRING_KICK, CALL or ERR and takes the
// descriptor out of m, -1 if there is none.
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
