package vhostvsock

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// The hybrid dialect is Firecracker's (docs/vsock.md there): a client sends "CONNECT <port>\n",
// gets the answer "OK <local port>\n", and then has a byte stream.
const (
	connectWord = "CONNECT "

	// maxConnectLine exceeds the length of the longest line, "CONNECT 4294967295\n".
	maxConnectLine = 32

	anyPort = 1<<32 - 1 // VMADDR_PORT_ANY, on which nothing can listen
)

var errNoLine = errors.New("the line has not ended")

// parseConnect parses the first line in b and returns the port and the line's length. If the line
// is incomplete, the error is errNoLine.
func parseConnect(b []byte) (port uint32, length int, err error) {
	end := bytes.IndexByte(b, '\n')
	if end < 0 && len(b) < maxConnectLine {
		return 0, 0, errNoLine
	}
	if end < 0 || end >= maxConnectLine {
		return 0, 0, fmt.Errorf("no line end in %d bytes, want %q and a port", maxConnectLine, connectWord)
	}
	digits, ok := bytes.CutPrefix(b[:end], []byte(connectWord))
	if !ok {
		return 0, 0, fmt.Errorf("line %q, want %q and a port", b[:end], connectWord)
	}
	n, err := strconv.ParseUint(string(digits), 10, 32)
	if err != nil || n == anyPort {
		return 0, 0, fmt.Errorf("port %q, want a number below %d", digits, uint32(anyPort))
	}
	return uint32(n), end + 1, nil
}

// readConnect reads the first line from a client's socket, and no bytes after it.
func readConnect(fd int) (port uint32, err error) {
	var b [maxConnectLine]byte
	n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK)
	if err != nil {
		if retryable(err) {
			err = errNoLine
		}
		return 0, err
	}
	if n == 0 {
		return 0, errors.New("closed before it said CONNECT")
	}
	port, length, err := parseConnect(b[:n])
	if err != nil {
		return 0, err
	}
	if got, _, err := unix.Recvfrom(fd, b[:length], 0); err != nil || got != length {
		return 0, fmt.Errorf("took %d bytes of a line of %d: %w", got, length, err)
	}
	return port, nil
}
