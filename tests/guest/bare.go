package main

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/guest/remote"
)

// bareEcho serves an echo for ever, in a process that does nothing else. Each connection has its
// own P, because the threads do not tell Go's runtime that they wait: the runtime would otherwise
// keep another thread awake that looks for work for them, on the processor that the answer needs.
// The garbage collector is off.
func bareEcho() error {
	listener, err := listenEcho(&unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: remote.BareEchoPort})
	if err != nil {
		return fmt.Errorf("listen on vsock port %d: %w", remote.BareEchoPort, err)
	}
	return serveBareEcho(listener)
}

// serveBareEcho takes over the whole process: any other goroutine in it stops sooner or later.
func serveBareEcho(listener int) error {
	runtime.GOMAXPROCS(remote.BareEchoes + 1)
	debug.SetGCPercent(-1)
	buffers := make(chan []byte, remote.BareEchoes) // buffers are used again and never freed
	for range cap(buffers) {
		buffers <- make([]byte, 4<<10)
	}
	for {
		buffer := <-buffers
		conn, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			go func() {
				echoBare(conn, buffer)
				buffers <- buffer
			}()
			continue
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ECONNABORTED):
			return err
		}
		buffers <- buffer
	}
}

// echoBare makes two system calls per round.
func echoBare(conn int, buffer []byte) {
	defer unix.Close(conn)
	for {
		n, ok := raw(unix.SYS_READ, conn, buffer)
		if !ok || n == 0 {
			return
		}
		for rest := buffer[:n]; len(rest) > 0; {
			n, ok := raw(unix.SYS_WRITE, conn, rest)
			if !ok {
				return
			}
			rest = rest[n:]
		}
	}
}

// raw makes a read(2) or write(2), and repeats it after a signal.
func raw(call uintptr, conn int, buffer []byte) (n int, ok bool) {
	for {
		n, _, errno := unix.RawSyscall(call, uintptr(conn), uintptr(unsafe.Pointer(unsafe.SliceData(buffer))), uintptr(len(buffer)))
		if errno != unix.EINTR {
			return int(n), errno == 0
		}
	}
}
