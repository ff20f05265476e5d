package vhostvsock

import (
	"slices"

	"golang.org/x/sys/unix"
)

// maxSilent is how many connections of front ends may be open that have not sent anything.
const maxSilent = 8

// silentFrontEnd is a connection to the front end's socket that has not sent anything yet: QEMU's,
// or that of a program that only checks whether the socket is served.
type silentFrontEnd struct {
	fd int
	id uint32 // for the poller, because descriptor numbers are reused
}

// acceptFrontEnds accepts all waiting connections. If there are more than maxSilent, it closes the
// oldest silent one.
func (b *Backend) acceptFrontEnds() {
	b.accept(b.listener.FD, func(fd int) {
		if b.frontEnd >= 0 {
			b.refuse(fd)
			return
		}
		if len(b.silent) == maxSilent {
			b.poll.closeFD(b.silent[0].fd)
			b.silent = b.silent[1:]
		}
		b.silentID++
		if err := b.poll.add(fd, unix.EPOLLIN, sourceSilent, b.silentID); err != nil {
			b.log.Warnf("front end refused: %v", err)
			unix.Close(fd)
			return
		}
		b.silent = append(b.silent, silentFrontEnd{fd, b.silentID})
	})
}

func (b *Backend) refuse(fd int) {
	b.log.Warn("a second front end was refused: the first one is still connected")
	b.poll.closeFD(fd)
}

// silentEvent handles the first message of a silent connection, or its end. The first connection to
// send a message is the front end; all others are refused.
func (b *Backend) silentEvent(id uint32) error {
	at := slices.IndexFunc(b.silent, func(s silentFrontEnd) bool { return s.id == id })
	if at < 0 {
		return nil
	}
	fd := b.silent[at].fd
	n, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_PEEK)
	if err != nil && retryable(err) {
		return nil
	}
	b.silent = slices.Delete(b.silent, at, at+1)
	if n == 0 || err != nil {
		b.poll.closeFD(fd)
		return nil
	}
	for _, s := range b.silent {
		b.refuse(s.fd)
	}
	b.silent, b.frontEnd = nil, fd
	b.log.Info("QEMU connected")
	if err := b.poll.modify(fd, unix.EPOLLIN, sourceFrontEnd, 0); err != nil {
		return err
	}
	return b.frontEndEvent()
}
