package vhostvsock

import (
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"
)

// loop handles events until the front end goes away or an error ends it.
func (b *Backend) loop() error {
	// Memory that is shared may be taken away; see survive.
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

// acceptAgain is how long it takes until somebody is accepted again where that has
// failed: no event says that there are descriptors again.
const acceptAgain = 100 * time.Millisecond

// patience is how long there may be no event, less than 0 for ever.
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

// whenTimePassed does what no event asks for.
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

// dispatch handles one event. Kicks need nothing but the turn of both queues
// that follows; clients mark what they want from it.
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

// clientEvent lets the mux handle what the poller says of a client.
func (b *Backend) clientEvent(hostPort, events uint32) {
	err := b.survive(func() error {
		b.mux.clientEvent(hostPort, events)
		return nil
	})
	if err != nil {
		b.mux.disconnect(hostPort)
	}
}

// frontEndEvent handles the messages that are there.
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

// acceptClients takes every client that waits.
func (b *Backend) acceptClients() {
	b.accept(b.hybrid.FD, b.mux.add)
}

// accept gives every connection that waits to take. Where descriptors have run out
// it is stalled, and the connections wait until acceptAgain.
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
				b.log.Warnf("who connects has to wait: accept: %v", err)
			}
			b.stalled, b.saidStalled = true, true
			return
		}
	}
}

// turn serves a queue. What goes wrong there is the guest's doing.
func (b *Backend) turn(index int, serve func() error) {
	if err := b.survive(serve); err != nil {
		b.fail(index, err)
	}
}

// drain takes what the guest has sent: one queue length a turn, so that the
// clients have theirs.
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

// supply gives the guest what the clients have sent, as far as it has given
// buffers.
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

// fail ends the device that the guest broke, until its driver starts anew.
func (b *Backend) fail(index int, err error) {
	b.log.Warnf("the guest broke queue %d, its connections end: %v", index, err)
	b.device.rings[index].fail()
	b.mux.guestBroken()
}

// survive does what foreign bytes ask for. Should they make it panic, that is a
// bug of ours and is logged as one, but the other connections, which know
// nothing of it, go on.
func (b *Backend) survive(do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			b.log.Errorf("please report this bug of directvol's: %v\n%s", r, debug.Stack())
			err = fmt.Errorf("a bug of ours: %v", r)
		}
	}()
	return do()
}
