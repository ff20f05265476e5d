package vhostvsock

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// source is the kind of a descriptor in the poller.
type source int32

const (
	sourceWake     source = iota // Serve should end
	sourceListener               // a front end wants to connect
	sourceSilent                 // the first message of a front end; id is silentFrontEnd.id
	sourceFrontEnd               // the front end's messages
	sourceHybrid                 // clients want to connect
	sourceKick                   // the guest kicked the queue with index id
	sourceClient                 // the client of the connection with host port id
)

// poller is an epoll(7) instance. It identifies descriptors by a source and an id, not by their
// numbers, because another file may have a number by the time an event is handled.
type poller struct {
	fd     int
	events [64]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	return &poller{fd: fd}, nil
}

func (p *poller) close() { unix.Close(p.fd) }

// add watches fd for events.
func (p *poller) add(fd int, events uint32, from source, id uint32) error {
	return p.control(unix.EPOLL_CTL_ADD, fd, events, from, id)
}

func (p *poller) modify(fd int, events uint32, from source, id uint32) error {
	return p.control(unix.EPOLL_CTL_MOD, fd, events, from, id)
}

func (p *poller) control(op, fd int, events uint32, from source, id uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(from), Pad: int32(id)}
	if err := unix.EpollCtl(p.fd, op, fd, &ev); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

// closeFD removes a descriptor from the poller and closes it. close(2) alone would not remove an
// eventfd of the front end: epoll keeps a file as long as any process has it open, and the front
// end does.
func (p *poller) closeFD(fd int) {
	unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, fd, nil)
	unix.Close(fd)
}

// wait returns the pending events. It waits for at most longest and then returns none; a negative
// longest means without a limit.
func (p *poller) wait(longest time.Duration) ([]unix.EpollEvent, error) {
	timeout := -1
	if longest >= 0 {
		timeout = int((longest + time.Millisecond - 1) / time.Millisecond)
	}
	for {
		n, err := unix.EpollWait(p.fd, p.events[:], timeout)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("epoll_wait: %w", err)
		}
		return p.events[:n], nil
	}
}
