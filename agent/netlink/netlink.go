// Package netlink receives messages of the kernel on netlink(7), and rejects all others: any
// program in the same network namespace with CAP_NET_ADMIN may send to a netlink socket.
package netlink

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrForeign means that a message was not sent by the kernel.
var ErrForeign = errors.New("netlink: not the kernel's")

// Open returns a socket of a protocol that has joined the multicast groups in the bit mask groups.
// The caller closes the socket. The socket supports deadlines.
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

// Receive waits for the next message, until the socket's deadline, and returns the number of its
// bytes in buffer. An overrun of the socket's own buffer returns ENOBUFS.
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
