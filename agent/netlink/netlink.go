// Package netlink hears what the kernel says on netlink(7), and nobody else: any program in
// the same network namespace may send to a netlink socket, given CAP_NET_ADMIN.
package netlink

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrForeign is of a message that the kernel has not sent.
var ErrForeign = errors.New("netlink: not the kernel's")

// Open returns a socket of a protocol that has joined multicast groups, one a bit. The
// caller closes it. Its deadlines can be set.
func Open(protocol int, groups uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket(AF_NETLINK)", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("bind(AF_NETLINK)", err)
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// Receive waits for the next message, until the socket's deadline, and returns how many
// bytes of it are in buffer. An overrun of the socket's own buffer is ENOBUFS.
func Receive(socket *os.File, buffer []byte) (n int, err error) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return 0, err
	}
	var from unix.Sockaddr
	var receiveErr error
	err = raw.Read(func(fd uintptr) bool {
		n, from, receiveErr = unix.Recvfrom(int(fd), buffer, 0)
		return receiveErr != unix.EAGAIN
	})
	if err == nil {
		err = receiveErr
	}
	if err != nil {
		return 0, fmt.Errorf("receive from netlink: %w", err)
	}
	if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != 0 {
		return 0, ErrForeign
	}
	return n, nil
}
