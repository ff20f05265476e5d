package address

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/mdlayher/vsock"
)

// maxAnswer limits the length of the line that answers CONNECT, in bytes.
const maxAnswer = 64

// Dial connects to the address. ctx limits Dial alone; afterwards the connection belongs to the
// caller. Errors contain the address, and wrap ctx's error if ctx ended first.
func (a Address) Dial(ctx context.Context) (net.Conn, error) {
	conn, err := a.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", a, err)
	}
	return conn, nil
}

func (a Address) dial(ctx context.Context) (net.Conn, error) {
	if err := a.check(); err != nil {
		return nil, err
	}
	if a.Scheme == VSock {
		conn, err := vsock.DialContext(ctx, a.CID, a.Port, nil)
		if err != nil {
			return nil, err // a nil *vsock.Conn would be a non-nil net.Conn
		}
		return conn, nil
	}
	// Not DialContext, which would link the resolver of names.
	conn, err := (&net.Dialer{}).DialUnix(ctx, "unix", nil, &net.UnixAddr{Name: a.Path, Net: "unix"})
	if err != nil {
		return nil, err // a nil *net.UnixConn would be a non-nil net.Conn
	}
	if a.Scheme == Unix {
		return conn, nil
	}
	if err := connect(ctx, conn, a.Port); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// connect asks the other side of a hybrid socket for a port of the guest. It reads nothing after
// the line of the answer.
func connect(ctx context.Context, conn net.Conn, port uint32) error {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	err := request(conn, port)
	if !stop() {
		return ctx.Err()
	}
	return err
}

// request sends CONNECT in a single write, because Firecracker refuses a line that arrives in
// pieces.
func request(conn net.Conn, port uint32) error {
	_, err := io.WriteString(conn, fmt.Sprintf("CONNECT %d\n", port))
	if errors.Is(err, syscall.EPIPE) {
		return closed(port, err)
	}
	if err != nil {
		return fmt.Errorf("ask for port %d: %w", port, err)
	}
	var answer strings.Builder
	for b := make([]byte, 1); answer.Len() < maxAnswer; answer.WriteByte(b[0]) {
		_, err := io.ReadFull(conn, b)
		if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
			return closed(port, err)
		}
		if err != nil {
			return fmt.Errorf("wait for the answer to CONNECT %d: %w", port, err)
		}
		if b[0] != '\n' {
			continue
		}
		if line := answer.String(); line != "OK" && !strings.HasPrefix(line, "OK ") {
			return fmt.Errorf("CONNECT %d was answered with %q, not OK: is this a hybrid vsock socket?", port, line)
		}
		return nil
	}
	return fmt.Errorf("CONNECT %d was answered with %q and no end of line: is this a hybrid vsock socket?", port, answer.String())
}

// closed returns the error for a connection that was closed without an OK, which is how all
// implementations refuse. Firecracker and Cloud Hypervisor also close if there are 1023 connections
// already, or if the guest has not accepted within 2 s.
func closed(port uint32, err error) error {
	return fmt.Errorf("closed without an OK: nobody listens on port %d in the guest, the guest is not up, or it has too many connections: %w", port, err)
}
