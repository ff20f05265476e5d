package transport

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// stream is a connection without calls. Its socket is in Go's poller, so that waiting for the peer
// needs no thread.
type stream struct {
	*os.File
	local, remote net.Addr
	onClose       func()
	once          sync.Once
}

func newStream(fd int, local, remote net.Addr, onClose func()) *stream {
	// Cannot fail for a socket; if it did, NewFile would use the socket in blocking mode.
	_ = unix.SetNonblock(fd, true)
	return &stream{File: os.NewFile(uintptr(fd), remote.String()), local: local, remote: remote, onClose: onClose}
}

// Close ends the connection. It may be called again.
func (s *stream) Close() error {
	err := s.File.Close()
	s.once.Do(s.onClose)
	return err
}

// LocalAddr returns the address of the listener.
func (s *stream) LocalAddr() net.Addr { return s.local }

// RemoteAddr returns the address of the peer.
func (s *stream) RemoteAddr() net.Addr { return s.remote }
