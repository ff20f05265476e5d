package main

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// awaitVsock returns once AF_VSOCK sockets can be made. The agent loads the vsock module some time
// after this process has started. The kernel announces a module by a uevent after the module's
// initialization (kernel/module/main.c, do_init_module).
func awaitVsock() error {
	// The socket is opened before the first try, so that no announcement is missed between the two.
	events, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return fmt.Errorf("open a uevent socket: %w", err)
	}
	defer unix.Close(events)
	if err := unix.Bind(events, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil { // group 1: the kernel's own events
		return fmt.Errorf("bind a uevent socket: %w", err)
	}
	var event [8 << 10]byte // the content does not matter: any event may be the announcement
	return await(tryVsock, func() error {
		_, err := unix.Read(events, event[:])
		if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR) { // events were lost, perhaps the announcement
			return nil
		}
		return err
	})
}

// tryVsock makes an AF_VSOCK socket and closes it.
func tryVsock() error {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// await calls try, and calls it again after each event, while the error is that the address family
// is missing.
func await(try, nextEvent func() error) error {
	for {
		err := try()
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EAFNOSUPPORT):
			return fmt.Errorf("open a vsock socket: %w", err)
		}
		if err := nextEvent(); err != nil {
			return fmt.Errorf("wait for vsock: read a uevent: %w", err)
		}
	}
}
