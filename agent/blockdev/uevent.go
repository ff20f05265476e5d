package blockdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/netlink"
)

// Limits of a uevent's text, from the kernel's lib/kobject_uevent.c: UEVENT_BUFFER_SIZE and
// UEVENT_NUM_ENVP.
const (
	ueventBytes = 2048
	ueventVars  = 64
)

// kernelGroup is the multicast group that carries the kernel's own uevents; group 2 is udev's.
const kernelGroup = 1

// uevent is one message of NETLINK_KOBJECT_UEVENT.
type uevent struct {
	action  string // add, remove, change, …
	devpath string // below /sys
	vars    map[string]string
}

// parseUevent parses "action@devpath\0KEY=value\0…".
func parseUevent(b []byte) (uevent, error) {
	head, rest, _ := bytes.Cut(b, []byte{0})
	action, devpath, ok := strings.Cut(string(head), "@")
	if !ok || action == "" || !strings.HasPrefix(devpath, "/") {
		return uevent{}, fmt.Errorf("uevent: header %.80q is not action@/devpath", head)
	}
	e := uevent{action: action, devpath: devpath, vars: map[string]string{}}
	for field := range bytes.SplitSeq(rest, []byte{0}) {
		key, value, ok := strings.Cut(string(field), "=")
		if !ok || key == "" {
			continue
		}
		if len(e.vars) == ueventVars {
			return uevent{}, fmt.Errorf("uevent: more than %d variables", ueventVars)
		}
		e.vars[key] = value
	}
	return e, nil
}

// uevents is an open subscription to the kernel's uevents. No event after subscribe has returned is
// missed: an overrun of the socket's buffer appears as an event without an action.
type uevents struct{ file *os.File }

func subscribe() (*uevents, error) {
	file, err := netlink.Open(unix.NETLINK_KOBJECT_UEVENT, kernelGroup)
	if err != nil {
		return nil, fmt.Errorf("uevents: %w", err)
	}
	return &uevents{file}, nil
}

func (u *uevents) close() { u.file.Close() }

// next waits for a subsystem's next event until ctx ends. It skips messages that the kernel did not
// send or that do not parse.
func (u *uevents) next(ctx context.Context, subsystem string) (uevent, error) {
	stop := context.AfterFunc(ctx, func() { u.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		e, err := u.receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return uevent{}, context.Cause(ctx)
		case errors.Is(err, unix.ENOBUFS):
			return uevent{}, nil
		case errors.Is(err, netlink.ErrForeign):
			continue
		case err != nil:
			return uevent{}, err
		case e.vars["SUBSYSTEM"] == subsystem:
			return e, nil
		}
	}
}

func (u *uevents) receive() (uevent, error) {
	var buf [2 * ueventBytes]byte
	n, err := netlink.Receive(u.file, buf[:])
	if err != nil {
		return uevent{}, fmt.Errorf("uevent: %w", err)
	}
	e, err := parseUevent(buf[:n])
	if err != nil {
		return uevent{}, netlink.ErrForeign
	}
	return e, nil
}
