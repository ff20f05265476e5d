package vhostvsock

import (
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"
)

// loop handles events until the front end disconnects or an error occurs.
func (b *Backend) loop() error {
	// Shared memory may be taken away, and an access then faults; survive handles the panic.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	for {
		events, err := b.poll.wait(b.patience())
		if err != nil {
			return err
		}
		b.mux.now = b.clock()
		for i := range events {
			if err := b.dispatch(&events[i]); err != nil {
				return err
			}
		}
		b.whenTimePassed()
		b.more = false
		b.turn(txQueue, b.drain)
		b.turn(rxQueue, b.supply)
	}
}

// acceptAgain is the pause after a failed accept. No event announces that descriptors are available
// again.
const acceptAgain = 100 * time.Millisecond

// patience returns the longest time to wait for an event; a negative value means without a limit.
func (b *Backend) patience() time.Duration {
	switch {
	case b.more:
		return 0
	case b.stalled:
		return acceptAgain
	case len(b.mux.conns) > 0:
		return sweepInterval
	default:
		return -1
	}
}

// whenTimePassed does the work that no event triggers.
func (b *Backend) whenTimePassed() {
	if b.stalled {
		b.stalled = false
		b.acceptFrontEnds()
		b.acceptClients()
	}
	if b.mux.now-b.swept >= sweepInterval {
		b.swept = b.mux.now
		b.mux.sweep(b.device.running() && !b.device.broken())
	}
}

// dispatch handles one event. Kicks need no work here, because the loop serves both queues after
// the events. Client events only mark the connections that have work.
func (b *Backend) dispatch(ev *unix.EpollEvent) error {
	switch source(ev.Fd) {
	case sourceWake:
		return errInterrupted
	case sourceListener:
		b.acceptFrontEnds()
	case sourceSilent:
		return b.survive(func() error { return b.silentEvent(uint32(ev.Pad)) })
	case sourceFrontEnd:
		return b.survive(b.frontEndEvent)
	case sourceHybrid:
		b.acceptClients()
	case sourceClient:
		b.clientEvent(uint32(ev.Pad), ev.Events)
	}
	return nil
}

// clientEvent passes a client's event to the mux.
func (b *Backend) clientEvent(hostPort, events uint32) {
	err := b.survive(func() error {
		b.mux.clientEvent(hostPort, events)
		return nil
	})
	if err != nil {
		b.mux.disconnect(hostPort)
	}
}

// frontEndEvent handles the messages that have arrived.
func (b *Backend) frontEndEvent() error {
	for {
		m, err := b.reader.read(b.frontEnd)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			if b.device.running() {
				return ErrFrontEndGone
			}
			return errInterrupted
		}
		if m == nil || err != nil {
			return err
		}
		reply, err := b.device.handle(m)
		if reply != nil {
			if werr := writeReply(b.frontEnd, m.request, reply); err == nil {
				err = werr
			}
		}
		if err != nil {
			return err
		}
	}
}

// acceptClients accepts all waiting clients.
func (b *Backend) acceptClients() {
	b.accept(b.hybrid.FD, b.mux.add)
}

// accept accepts all waiting connections and passes them to take. If the process is out of
// descriptors, accept sets stalled, and the connections wait for acceptAgain.
func (b *Backend) accept(listener int, take func(fd int)) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			b.saidStalled = false
			take(fd)
		case errors.Is(err, unix.EAGAIN):
			return
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ECONNABORTED):
			if !b.saidStalled {
				b.log.Warnf("new connections have to wait: accept: %v", err)
			}
			b.stalled, b.saidStalled = true, true
			return
		}
	}
}

// turn serves a queue. An error there is the guest's fault.
func (b *Backend) turn(index int, serve func() error) {
	if err := b.survive(serve); err != nil {
		b.fail(index, err)
	}
}

// drain processes the packets that the guest has sent. It processes one queue length per turn, so
// that the clients get their turn.
func (b *Backend) drain() error {
	r := &b.device.rings[txQueue]
	q := r.served()
	if q == nil || b.device.broken() {
		return nil
	}
	for range q.size {
		chain, err := q.next(false)
		if err != nil {
			return err
		}
		if chain == nil {
			if !q.awaitKick() {
				r.notify()
				return nil
			}
			continue
		}
		b.mux.receive(chain)
		q.complete(0)
	}
	r.notify()
	b.more = true
	return nil
}

// supply gives the guest the packets for it, as far as the guest has provided buffers.
func (b *Backend) supply() error {
	r := &b.device.rings[rxQueue]
	q := r.served()
	if q == nil || b.device.broken() {
		return nil
	}
	for range q.size {
		if !b.mux.waiting() {
			return nil
		}
		room, err := q.next(true)
		if err == nil && room != nil {
			err = checkReceiveBuffer(room)
		}
		if err != nil {
			return err
		}
		if room == nil {
			if !q.awaitKick() {
				return nil
			}
			continue
		}
		if n := b.mux.fill(room); n > 0 {
			q.complete(n)
			r.notify()
		}
	}
	b.more = true
	return nil
}

// fail stops a device that the guest has broken, until its driver restarts it.
func (b *Backend) fail(index int, err error) {
	b.log.Warnf("the guest has damaged queue %d, so its connections end: %v", index, err)
	b.device.rings[index].fail()
	b.mux.guestBroken()
}

// survive runs do, which processes untrusted bytes. If do panics, survive logs that as a bug of
// directvol and returns an error. The other connections are not affected and continue.
func (b *Backend) survive(do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			b.log.Errorf("please report this bug in directvol: %v\n%s", r, debug.Stack())
			err = fmt.Errorf("a bug in directvol: %v", r)
		}
	}()
	return do()
}
