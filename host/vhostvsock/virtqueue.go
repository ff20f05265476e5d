package vhostvsock

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Numbers of linux/virtio_ring.h.
const (
	descSize      = 16
	descNext      = 1 << 0
	descWrite     = 1 << 1
	descKnown     = descNext | descWrite // indirect tables are not offered
	availNoSignal = 1 << 0               // VRING_AVAIL_F_NO_INTERRUPT

	// maxQueueSize limits the size in SET_VRING_NUM. It is QEMU's own limit.
	maxQueueSize = 1024
)

// virtqueue is the device's side of a split ring (virtio 1.2, section 2.7). It takes chains in
// order and completes each before it takes the next one.
//
// The guest may write anything into the ring. An error means that the ring is malformed and must
// not be used any more.
type virtqueue struct {
	mem      *memory
	size     uint16
	desc     []byte
	avail    []byte
	used     []byte
	eventIdx bool // VIRTIO_RING_F_EVENT_IDX was negotiated

	nextAvail uint16 // the next entry of the avail ring to take
	nextUsed  uint16 // the next entry of the used ring to fill

	// signalled is the value of nextUsed when wantsSignal last checked. It is undefined before the
	// first check.
	signalled      uint16
	everConsidered bool

	held  bool // chain contains a chain that is not completed yet
	head  uint16
	chain segments
}

// newVirtqueue finds the three parts of a ring in memory. base is the first avail entry to take.
// The used index continues from its value in the ring.
func newVirtqueue(mem *memory, size uint32, addr vringAddr, base uint16, eventIdx bool) (*virtqueue, error) {
	if size == 0 || size > maxQueueSize || size&(size-1) != 0 {
		return nil, fmt.Errorf("queue size %d: want a power of 2 up to %d", size, maxQueueSize)
	}
	q := &virtqueue{mem: mem, size: uint16(size), nextAvail: base, eventIdx: eventIdx}
	n, event := uint64(size), uint64(0)
	if eventIdx {
		event = 2
	}
	var err error
	if q.desc, err = mem.user(addr.desc, descSize*n, 16); err != nil {
		return nil, fmt.Errorf("descriptor table: %w", err)
	}
	if q.avail, err = mem.user(addr.avail, 4+2*n+event, 2); err != nil {
		return nil, fmt.Errorf("avail ring: %w", err)
	}
	if q.used, err = mem.user(addr.used, 4+8*n+event, 4); err != nil {
		return nil, fmt.Errorf("used ring: %w", err)
	}
	q.nextUsed = load16(q.used, 2)
	q.chain = make(segments, 0, size)
	return q, nil
}

// next returns the next chain, or none if the guest has provided no more. Until complete is called,
// next returns the same chain. All descriptors of the chain must be writable for the device if
// writable is set, and readable otherwise; any other chain is malformed.
func (q *virtqueue) next(writable bool) (segments, error) {
	if q.held {
		return q.chain, nil
	}
	waiting := load16(q.avail, 2) - q.nextAvail
	if waiting == 0 {
		return nil, nil
	}
	if waiting > q.size {
		return nil, fmt.Errorf("avail index is %d ahead in a queue of %d", waiting, q.size)
	}
	head := load16(q.avail, 4+2*int(q.nextAvail%q.size))
	if err := q.walk(head, writable); err != nil {
		return nil, fmt.Errorf("chain at descriptor %d: %w", head, err)
	}
	q.held, q.head = true, head
	return q.chain, nil
}

// walk collects the chain that begins at descriptor i.
func (q *virtqueue) walk(i uint16, writable bool) error {
	q.chain = q.chain[:0]
	for count := uint16(0); ; count++ {
		if i >= q.size {
			return fmt.Errorf("descriptor %d in a queue of %d", i, q.size)
		}
		if count == q.size {
			return fmt.Errorf("longer than the queue of %d, it loops", q.size)
		}
		var d [descSize]byte // a copy, which the guest cannot change after the checks
		copy(d[:], q.desc[descSize*int(i):])
		addr := binary.LittleEndian.Uint64(d[:])
		length := binary.LittleEndian.Uint32(d[8:])
		flags := binary.LittleEndian.Uint16(d[12:])
		if flags&^descKnown != 0 || flags&descWrite != 0 != writable {
			return fmt.Errorf("descriptor %d has flags %#x, writable should be %t", i, flags, writable)
		}
		b, err := q.mem.guest(addr, uint64(length))
		if err != nil {
			return fmt.Errorf("descriptor %d: %w", i, err)
		}
		q.chain = append(q.chain, b)
		if flags&descNext == 0 {
			return nil
		}
		i = binary.LittleEndian.Uint16(d[14:])
	}
}

// complete returns the chain from next to the guest, with the number of bytes written into it.
func (q *virtqueue) complete(written int) {
	slot := q.used[4+8*int(q.nextUsed%q.size):]
	binary.LittleEndian.PutUint32(slot, uint32(q.head))
	binary.LittleEndian.PutUint32(slot[4:], uint32(written))
	q.nextUsed++
	q.nextAvail++
	q.held = false
	// flags and idx share a word, and the device owns both. The store of idx makes the entry
	// visible before idx.
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&q.used[0])), uint32(q.nextUsed)<<16)
}

// wantsSignal reports whether the guest wants a signal for the chains completed since the last
// check (virtio 1.2, sections 2.7.7 and 2.7.8).
func (q *virtqueue) wantsSignal() bool {
	from, to := q.signalled, q.nextUsed
	first := !q.everConsidered
	if !first && from == to {
		return false
	}
	q.signalled, q.everConsidered = to, true
	if !q.eventIdx {
		return load16(q.avail, 0)&availNoSignal == 0
	}
	event := load16(q.avail, 4+2*int(q.size))
	return first || to-event-1 < to-from
}

// awaitKick asks the guest to kick when it adds the next chain. It returns true if there is a chain
// already, because that one may come without a kick.
func (q *virtqueue) awaitKick() bool {
	if q.eventIdx {
		// A full barrier: either the guest sees the new value, or the device sees the guest's
		// chain.
		store16(q.used, 4+8*int(q.size), q.nextAvail)
	}
	return load16(q.avail, 2) != q.nextAvail
}
