package main

import (
	"errors"
	"runtime"

	"golang.org/x/sys/unix"
)

// listenEcho returns a listening stream socket on addr. The socket blocks, unlike Go's own sockets:
// see echo.
func listenEcho(addr unix.Sockaddr) (fd int, err error) {
	family := unix.AF_VSOCK
	if _, ok := addr.(*unix.SockaddrUnix); ok {
		family = unix.AF_UNIX
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, addr); err == nil {
		err = unix.Listen(fd, unix.SOMAXCONN)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// serveEcho accepts connections on a socket of listenEcho until that fails.
func serveEcho(listener int) error {
	for {
		conn, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			go echo(conn)
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ECONNABORTED):
			return err
		}
	}
}

// echo sends back the bytes that it receives until the other side ends the connection. It uses its
// own thread, which blocks in read and write. Round trips are not measured against this echo but
// against bareEcho.
func echo(conn int) {
	runtime.LockOSThread() // never unlocked, so that the thread ends with the connection
	defer unix.Close(conn)
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(conn, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n <= 0 || !writeAll(conn, buf[:n]) {
			return
		}
	}
}

func writeAll(conn int, data []byte) bool {
	for len(data) > 0 {
		n, err := unix.Write(conn, data)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return false
		default:
			data = data[n:]
		}
	}
	return true
}
