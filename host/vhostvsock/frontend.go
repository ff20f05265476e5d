package vhostvsock

import (
	"slices"

	"golang.org/x/sys/unix"
)

// maxSilent is how many may be connected as front ends without a word.
const maxSilent = 8

// silentFrontEnd has connected as a front end and said nothing yet: QEMU in a
// moment, or somebody who looks whether we are there.
type silentFrontEnd struct {
	fd int
	id uint32 // to the poller: descriptors are used again
}

// acceptFrontEnds takes every connection that waits. The one that has been silent
// for longest gives way to one more than maxSilent.
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
	b.log.Warn("a second front end was refused: the front end that came first is there")
	b.poll.closeFD(fd)
}

// silentEvent handles the first word of one that was silent, or its end. The first
// of all to speak is the front end, and the others are refused.
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
