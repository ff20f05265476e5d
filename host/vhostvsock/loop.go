package vhostvsock

import (
	"errors"
	"fmt"
	"io"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// loop handles events until the front end goes away or an error ends it.
func (b *Backend) loop() error {
	// Memory that is shared may be taken away; see survive.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	for {
		events, err := b.poll.wait(!b.more)
		if err != nil {
			return err
		}
		for i := range events {
			if err := b.dispatch(&events[i]); err != nil {
				return err
			}
		}
		if b.stalled {
			b.acceptClients() // a connection may have ended meanwhile
		}
		b.more = false
		b.turn(txQueue, b.drain)
		b.turn(rxQueue, b.supply)
	}
}

// dispatch handles one event. Kicks need nothing but the turn of both queues
// that follows; clients mark what they want from it.
func (b *Backend) dispatch(ev *unix.EpollEvent) error {
	switch source(ev.Fd) {
	case sourceWake:
		return errInterrupted
	case sourceListener:
		return b.acceptFrontEnd()
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

// acceptFrontEnd takes a connection if there is none yet.
func (b *Backend) acceptFrontEnd() error {
	fd, err := accept(b.listener.FD)
	if err != nil || b.frontEnd >= 0 {
		closeFDs([]int{fd})
		return err
	}
	b.frontEnd = fd
	return b.poll.add(fd, unix.EPOLLIN, sourceFrontEnd, 0)
}

// frontEndEvent handles the messages that are there.
func (b *Backend) frontEndEvent() error {
	for {
		m, err := b.reader.read(b.frontEnd)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return b.frontEndClosed()
		}
		if m == nil || err != nil {
			return err
		}
		if !b.spoken {
			b.spoken = true
			b.log.Info("QEMU connected")
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

// frontEndClosed ends the service, unless it was only someone who looked
// whether we are there.
func (b *Backend) frontEndClosed() error {
	if !b.spoken {
		b.poll.closeFD(b.frontEnd)
		b.frontEnd = -1
		return nil
	}
	if b.device.running() {
		return ErrFrontEndGone
	}
	return errInterrupted
}

// acceptClients takes every connection that waits. Where descriptors have run
// out it is stalled, and tries again at later events.
func (b *Backend) acceptClients() {
	for {
		fd, err := accept(b.hybrid.FD)
		if err != nil && !b.stalled {
			b.log.Warnf("clients have to wait: %v", err)
		}
		b.stalled = err != nil
		if fd < 0 {
			return
		}
		b.mux.add(fd)
	}
}

// accept returns -1 when nobody waits.
func accept(listener int) (int, error) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
		case errors.Is(err, unix.EAGAIN):
			return -1, nil
		default:
			return -1, fmt.Errorf("accept: %w", err)
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
