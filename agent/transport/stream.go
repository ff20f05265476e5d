package transport

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// stream is a connection without calls. Its socket is in Go's poller: whoever
// waits for such a peer has no thread of their own.
type stream struct {
	*os.File
	local, remote net.Addr
	onClose       func()
	once          sync.Once
}

func newStream(fd int, local, remote net.Addr, onClose func()) *stream {
	// Cannot fail for a socket; where it did, NewFile would take it as it is.
	_ = unix.SetNonblock(fd, true)
	return &stream{File: os.NewFile(uintptr(fd), remote.String()), local: local, remote: remote, onClose: onClose}
}

// Close ends the connection, and may be called again.
func (s *stream) Close() error {
	err := s.File.Close()
	s.once.Do(s.onClose)
	return err
}

// LocalAddr is the address that was listened on.
func (s *stream) LocalAddr() net.Addr { return s.local }

// RemoteAddr is the peer's.
func (s *stream) RemoteAddr() net.Addr { return s.remote }
