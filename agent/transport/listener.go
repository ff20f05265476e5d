// Package transport connects the host to the agent. It has listeners on vsock and on unix sockets
// that admit only the host, and connections that answer quick calls in the goroutine that reads
// them. Other calls go to ttrpc's server, or to the server of a Route. Streams, which carry no
// calls, use the same listeners.
//
// All connections with calls together take at most an eighth of the guest's memory, or 33 MiB if
// that is more: one half for being open (at most 256 connections), one half for their calls. A call
// is charged from before its frame is read until its answer is written or its connection has ended.
// The charge is 16 KiB plus six times the frame, which no message exceeds (protocols/gogocodec).
// Each connection has 48 KiB of its own for small calls, and may borrow up to half of what is lent
// to all.
//
//	no memory for a call     its connection is not read until there is some; the smallest
//	                         request is served first
//	no place for another     the least recently used connection without a call is ended; if
//	connection               all have calls, the new one is refused
//	stuck at one frame or    the connection is ended if others wait for its memory or its
//	answer for 5 s           place
//	an answer is not read    its connection is ended after 30 s
//	a flood is over          its memory is returned to the kernel one second later
//
// A quick call is charged nothing, because its frame is in the connection's own buffer. Frames go
// to a server in the order in which they came, even if one of them waits for memory. Calls that
// change who holds which storage carry a ticket (agent/arrival) if their frames are no longer than
// 320 KiB.
package transport

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/arrival"
	"github.com/directvol/directvol/protocols/address"
)

// backlog is how many connections may wait for Accept.
const backlog = 128

// Listener accepts connections that admit lets in.
type Listener struct {
	file  *os.File // in Go's poller, so that Close wakes Accept
	addr  addr
	admit func(fd int, peer unix.Sockaddr) (remote addr, err error)
	open  func(fd int, remote addr) (net.Conn, error)
	log   *logrus.Entry
	room  *room // of connections with calls
	most  int   // the largest number of open streams

	remove func() // removes the socket's path, which may be another's by then; may be nil

	mu     sync.Mutex
	conns  int
	closed chan struct{} // closed and replaced whenever a connection ends
}

// addr is an address in the form of protocols/address.
type addr struct{ network, text string }

func (a addr) Network() string { return a.network }
func (a addr) String() string  { return a.text }

// Listen listens at an address: a vsock port, whatever its CID, or a unix socket. Calls for which
// order.Has is true begin in the order of arrival; order may be nil. A call that quick declines
// goes to the first route that has it, or else to the server that accepts the connection.
func Listen(to address.Address, quick Quick, order *arrival.Order, log *logrus.Entry, routes ...Route) (*Listener, error) {
	memory, err := guestMemory()
	if err != nil {
		return nil, err
	}
	l := &Listener{room: newRoom(boundsOf(memory)), log: log}
	l.room.order, l.room.routes, l.room.warn = order, routes, log.Warnf
	l.open = func(fd int, remote addr) (net.Conn, error) {
		return newConn(fd, l.addr, remote, quick, l.room, l.gone)
	}
	return l.listenAt(to)
}

// ListenStreams is Listen for connections that carry no calls. most is the largest number of open
// connections. They support deadlines, and Close wakes a blocked Read or Write.
func ListenStreams(to address.Address, most int, log *logrus.Entry) (*Listener, error) {
	l := &Listener{most: most, log: log}
	l.open = func(fd int, remote addr) (net.Conn, error) {
		if err := l.count(); err != nil {
			return nil, err
		}
		return newStream(fd, l.addr, remote, l.uncount), nil
	}
	return l.listenAt(to)
}

func (l *Listener) listenAt(to address.Address) (*Listener, error) {
	l.closed = make(chan struct{})
	var err error
	switch to.Scheme {
	case address.VSock:
		err = l.listenVsock(to.Port)
	case address.Unix:
		err = l.listenUnix(to.Path)
	default:
		err = fmt.Errorf("listen on %s: an agent listens on vsock:// or unix://", to)
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

// listenVsock listens on a vsock port of this guest. It admits only the host (CID 2), and not a
// process of the guest that connects through the guest's own CID or CID 1.
func (l *Listener) listenVsock(port uint32) error {
	// In Kata's notation, whatever this guest's CID is.
	l.addr, l.admit = addr{"vsock", fmt.Sprintf("vsock://-1:%d", port)}, admitHost
	err := l.listen(unix.AF_VSOCK, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port})
	if err != nil {
		return fmt.Errorf("listen on vsock port %d: %w (is a vsock transport's module loaded, and the port free?)", port, err)
	}
	return nil
}

// listenUnix listens on a unix socket made by address.ListenUnix, or on an abstract one. It admits
// only root.
func (l *Listener) listenUnix(path string) error {
	l.addr, l.admit = addr{"unix", path}, admitRoot
	if strings.HasPrefix(path, "@") {
		if err := l.listen(unix.AF_UNIX, &unix.SockaddrUnix{Name: path}); err != nil {
			return fmt.Errorf("listen on unix socket %s: %w", path, err)
		}
		return nil
	}
	socket, err := address.ListenUnix(path)
	if err != nil {
		return err
	}
	l.file, l.remove = os.NewFile(uintptr(socket.FD), path), socket.Remove
	return nil
}

func (l *Listener) listen(family int, to unix.Sockaddr) error {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if l.room != nil && family == unix.AF_VSOCK { // connections inherit the size
		err = unix.SetsockoptUint64(fd, unix.AF_VSOCK, unix.SO_VM_SOCKETS_BUFFER_SIZE, socketBytes)
	}
	if err != nil {
		err = os.NewSyscallError("setsockopt(SO_VM_SOCKETS_BUFFER_SIZE)", err)
	} else if err = unix.Bind(fd, to); err != nil {
		err = os.NewSyscallError("bind", err)
	} else if err = unix.Listen(fd, backlog); err != nil {
		err = os.NewSyscallError("listen", err)
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	l.file = os.NewFile(uintptr(fd), l.addr.String())
	return nil
}

// Accept returns the next admitted connection.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		fd, peer, err := l.accept()
		if err != nil {
			return nil, &net.OpError{Op: "accept", Net: l.addr.network, Addr: l.addr, Err: err}
		}
		remote, err := l.admit(fd, peer)
		var conn net.Conn
		if err == nil {
			conn, err = l.open(fd, remote)
		}
		if err == nil {
			return conn, nil
		}
		l.log.Warnf("refused a connection: %v", err)
		unix.Close(fd)
	}
}

func (l *Listener) accept() (fd int, peer unix.Sockaddr, err error) {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return -1, nil, err
	}
	var acceptErr error
	err = raw.Read(func(listening uintptr) bool {
		for {
			fd, peer, acceptErr = unix.Accept4(int(listening), unix.SOCK_CLOEXEC)
			if acceptErr != unix.EINTR && acceptErr != unix.ECONNABORTED {
				return acceptErr != unix.EAGAIN
			}
		}
	})
	if err == nil {
		err = acceptErr
	}
	return fd, peer, err
}

func (l *Listener) count() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == l.most {
		return fmt.Errorf("%d connections are open already", l.most)
	}
	l.conns++
	return nil
}

func (l *Listener) uncount() {
	l.mu.Lock()
	l.conns--
	l.mu.Unlock()
	l.gone()
}

// gone wakes the callers that wait for a connection's end.
func (l *Listener) gone() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.closed)
	l.closed = make(chan struct{})
}

// HungUp returns a channel that is closed when the next connection ends. A host hangs up after it
// has read its last answer.
func (l *Listener) HungUp() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// Answered waits until every request that was read is answered on its connection, or until ctx
// ends.
func (l *Listener) Answered(ctx context.Context) error { return l.room.pending.await(ctx) }

// Close stops listening. Connections stay open.
func (l *Listener) Close() error {
	err := l.file.Close()
	if err == nil && l.remove != nil {
		l.remove()
	}
	return err
}

// Addr returns the address of the listener.
func (l *Listener) Addr() net.Addr { return l.addr }

// admitHost admits a peer with the host's CID.
func admitHost(_ int, peer unix.Sockaddr) (addr, error) {
	vm, ok := peer.(*unix.SockaddrVM)
	if !ok {
		return addr{}, fmt.Errorf("its peer %T has no vsock address", peer)
	}
	if vm.CID != unix.VMADDR_CID_HOST {
		return addr{}, fmt.Errorf("its peer is CID %d, not the host", vm.CID)
	}
	return addr{"vsock", fmt.Sprintf("vsock://%d:%d", vm.CID, vm.Port)}, nil
}

// admitRoot admits a peer that was root when it connected (unix(7), SO_PEERCRED).
func admitRoot(fd int, _ unix.Sockaddr) (addr, error) {
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return addr{}, os.NewSyscallError("getsockopt(SO_PEERCRED)", err)
	}
	if peer.Uid != 0 {
		return addr{}, fmt.Errorf("its peer is user %d, not root", peer.Uid)
	}
	return addr{"unix", fmt.Sprintf("pid %d", peer.Pid)}, nil
}
