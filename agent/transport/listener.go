// Package transport is how calls reach the agent: listeners on vsock and on
// unix sockets that admit the host alone, and connections that answer quick
// calls in the goroutine that reads them. ttrpc's server stands above and serves
// all the others.
package transport

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/address"
)

// maxConns is how many connections are open at once: each has a thread that
// waits for it. A host has one or two.
const maxConns = 256

// backlog is how many connections may wait to be accepted.
const backlog = 128

// Listener accepts connections that its admit lets in.
type Listener struct {
	file  *os.File // in Go's poller, so that Close wakes Accept
	addr  addr
	admit func(fd int, peer unix.Sockaddr) (remote addr, err error)
	quick Quick
	log   *logrus.Entry
	path  string // of a unix socket, which is removed at the end

	mu     sync.Mutex
	open   int
	closed chan struct{} // closed and replaced whenever a connection ends
}

// addr is an address as protocols/address writes it.
type addr struct{ network, text string }

func (a addr) Network() string { return a.network }
func (a addr) String() string  { return a.text }

// Listen listens where to says: on a vsock port, whatever CID it names, or on a
// unix socket.
func Listen(to address.Address, quick Quick, log *logrus.Entry) (*Listener, error) {
	switch to.Scheme {
	case address.VSock:
		return listenVsock(to.Port, quick, log)
	case address.Unix:
		return listenUnix(to.Path, quick, log)
	}
	return nil, fmt.Errorf("listen on %s: an agent listens on vsock:// or unix://", to)
}

// listenVsock listens on a vsock port of this guest. Only the host (CID 2) is
// admitted: not a process beside us in the guest, over its own CID or 1.
func listenVsock(port uint32, quick Quick, log *logrus.Entry) (*Listener, error) {
	l := &Listener{addr: vsockAddr(unix.VMADDR_CID_ANY, port), admit: admitHost, quick: quick, log: log}
	err := l.listen(unix.AF_VSOCK, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port})
	if err != nil {
		return nil, fmt.Errorf("listen on vsock port %d: %w (is a vsock transport's module loaded, and the port free?)", port, err)
	}
	return l, nil
}

// listenUnix listens on a unix socket, which it makes with mode 0600, in place
// of one that nobody listens on any more. Only root is admitted.
func listenUnix(path string, quick Quick, log *logrus.Entry) (*Listener, error) {
	if conn, err := net.Dial("unix", path); err == nil {
		conn.Close()
		return nil, fmt.Errorf("listen on unix socket %s: another process does already", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen on unix socket: %w", err)
	}
	l := &Listener{addr: addr{"unix", path}, admit: admitRoot, quick: quick, log: log, path: path}
	old := unix.Umask(0o177)
	err := l.listen(unix.AF_UNIX, &unix.SockaddrUnix{Name: path})
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listen on unix socket %s: %w", path, err)
	}
	return l, nil
}

func (l *Listener) listen(family int, to unix.Sockaddr) error {
	l.closed = make(chan struct{})
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	if err = unix.Bind(fd, to); err != nil {
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

// Accept returns the next connection that is admitted.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		fd, peer, err := l.accept()
		if err != nil {
			return nil, &net.OpError{Op: "accept", Net: l.addr.network, Addr: l.addr, Err: err}
		}
		remote, err := l.admit(fd, peer)
		if err == nil {
			err = l.count()
		}
		if err == nil {
			return newConn(fd, l.addr, remote, l.quick, l.uncount), nil
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
	if l.open == maxConns {
		return fmt.Errorf("%d are open already", maxConns)
	}
	l.open++
	return nil
}

func (l *Listener) uncount() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	close(l.closed)
	l.closed = make(chan struct{})
}

// HungUp returns a channel that is closed when the next connection ends: whoever
// has its last answer hangs up.
func (l *Listener) HungUp() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// Close stops listening. Connections stay open.
func (l *Listener) Close() error {
	err := l.file.Close()
	if err == nil && l.path != "" {
		os.Remove(l.path)
	}
	return err
}

// Addr is the address that is listened on.
func (l *Listener) Addr() net.Addr { return l.addr }

func vsockAddr(cid, port uint32) addr { return addr{"vsock", fmt.Sprintf("vsock://%d:%d", cid, port)} }

// admitHost admits the peer whose CID is the host's.
func admitHost(_ int, peer unix.Sockaddr) (addr, error) {
	vm, ok := peer.(*unix.SockaddrVM)
	if !ok {
		return addr{}, fmt.Errorf("its peer %T is none of vsock", peer)
	}
	if vm.CID != unix.VMADDR_CID_HOST {
		return addr{}, fmt.Errorf("its peer is CID %d, not the host", vm.CID)
	}
	return vsockAddr(vm.CID, vm.Port), nil
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
