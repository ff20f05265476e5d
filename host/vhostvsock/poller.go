package vhostvsock

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// source says what a descriptor in the poller is.
type source int32

const (
	sourceWake     source = iota // Serve is asked to end
	sourceListener               // a front end wants to connect
	sourceSilent                 // the first word of a front end, silent number id
	sourceFrontEnd               // the front end's messages
	sourceHybrid                 // clients want to connect
	sourceKick                   // the guest kicked queue number id
	sourceClient                 // the client of connection number id
)

// poller is an epoll(7) instance. Descriptors are named by a source and an id
// rather than by their number, which another file may have by the time an
// event is looked at.
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

// add watches fd for reading; edge triggered, if edge is set.
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

// closeFD closes a descriptor that was added. Closing alone is not enough: an
// eventfd of the front end lives on in its process, and in our set.
func (p *poller) closeFD(fd int) {
	unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, fd, nil)
	unix.Close(fd)
}

// wait returns the events there are, or none after so long; less than 0 is for ever.
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
