// Package vhostvsock is a virtio socket device in a separate process: the back end of QEMU's
// vhost-user-vsock-pci, for hosts without /dev/vhost-vsock. One Backend serves one virtual machine.
//
// Towards QEMU it speaks the vhost-user protocol (QEMU's docs/interop/vhost-user.rst) and serves
// the rx and tx queues of a virtio socket device (virtio 1.2, section 5.10; linux/virtio_vsock.h
// and linux/virtio_ring.h). Towards clients it has one unix socket in Firecracker's hybrid dialect.
// A client sends "CONNECT <port>\n". After a process in the guest has accepted, the client reads
// "OK <number>\n", and then has a byte stream to that process. If nothing listens on the port, the
// client's connection is closed without an answer. Connections that the guest begins are refused.
// Datagrams and SOCK_SEQPACKET are not offered. QEMU keeps the event queue.
//
// The package does not trust anything that the guest writes. It checks each address, length and
// index before use. A packet that breaks the rules ends its connection, and a malformed ring stops
// the device until the guest's driver restarts it. If such bytes trigger a bug in this package, the
// damage is limited in the same way. The front end, which owns the guest, is trusted to describe
// its memory, but its messages are checked.
//
// One goroutine does all the work, with epoll(7) and without locks. So a packet goes between the
// guest's memory and a client's socket in one system call, without waking another goroutine. No
// step blocks. A client that does not read stops only its own connection: the guest's bytes for it
// are buffered, up to the credit that the guest has, and the tx queue is always drained.
package vhostvsock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/address"
)

// Config configures a Backend.
type Config struct {
	Socket   string // QEMU connects here; made by Listen
	UDSPath  string // clients connect here; made by Listen
	GuestCID uint64 // the guest's address: 3 to 2^32-2

	// Log receives messages for the operator and, at debug level, a line for each connection that
	// ends early. Nil means no log.
	Log logrus.FieldLogger
}

// ErrFrontEndGone is Serve's error after QEMU closed its connection without stopping the device
// first: QEMU crashed or was killed.
var ErrFrontEndGone = errors.New("QEMU closed the connection while the device was running")

// Backend is a listening device. It serves one front end, once: the first that sends a message. It
// refuses all later ones; QEMU cannot reconnect a device whose backend it has lost. If the process
// runs out of descriptors, new connections wait. A client that is stuck for slotLimit is closed.
type Backend struct {
	cfg  Config
	log  logrus.FieldLogger
	poll *poller
	wake int // an eventfd that ends Serve

	listener *address.UnixSocket // for front ends
	silent   []silentFrontEnd    // connections that have not sent anything yet
	silentID uint32
	frontEnd int // -1 until one of them has sent something
	reader   messageReader
	device   *device

	hybrid      *address.UnixSocket // for clients
	mux         *mux
	more        bool // a queue still has work
	stalled     bool // accept failed, so connections may be waiting
	saidStalled bool

	clock func() time.Duration // monotonic
	swept time.Duration        // time of the last sweep for stuck clients

	mu       sync.Mutex
	serving  bool
	closed   bool
	finished chan struct{} // closed when everything is released
}

// Check returns what is wrong with a configuration. It makes nothing.
func (cfg Config) Check() error {
	if cfg.GuestCID <= hostCID || cfg.GuestCID >= 1<<32-1 {
		return fmt.Errorf("guest CID %d: want 3 to 4294967294, the others are reserved", cfg.GuestCID)
	}
	if cfg.Socket == cfg.UDSPath {
		return fmt.Errorf("socket %s: QEMU and the clients need one each", cfg.Socket)
	}
	return nil
}

// Listen makes both sockets, as address.ListenUnix does. When it returns, both are at their paths;
// UDSPath is made first. The caller must call Serve or Close.
func Listen(cfg Config) (*Backend, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	b := &Backend{cfg: cfg, log: cfg.Log, wake: -1, frontEnd: -1, finished: make(chan struct{})}
	if b.log == nil {
		silent := logrus.New()
		silent.SetOutput(io.Discard)
		b.log = silent
	}
	if err := b.open(); err != nil {
		b.release()
		return nil, err
	}
	return b, nil
}

func (b *Backend) open() (err error) {
	if b.poll, err = newPoller(); err != nil {
		return err
	}
	if b.wake, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	if b.hybrid, err = address.ListenUnix(b.cfg.UDSPath); err != nil {
		return err
	}
	if b.listener, err = address.ListenUnix(b.cfg.Socket); err != nil {
		return err
	}
	began := time.Now()
	b.clock = func() time.Duration { return time.Since(began) }
	b.mux = newMux(b.poll, b.cfg.GuestCID, b.log)
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("getrlimit: %w", err)
	}
	b.mux.most = mostConnections(files.Cur)
	b.device = newDevice(b.poll, b.cfg.GuestCID, b.mux.guestRestarted)
	return errors.Join(
		b.poll.add(b.wake, unix.EPOLLIN, sourceWake, 0),
		b.poll.add(b.listener.FD, unix.EPOLLIN|unix.EPOLLET, sourceListener, 0),
		b.poll.add(b.hybrid.FD, unix.EPOLLIN|unix.EPOLLET, sourceHybrid, 0))
}

// Serve waits for QEMU and serves it until it disconnects. It returns nil if QEMU stopped the
// device first, if ctx ends, and after Close. It returns ErrFrontEndGone if QEMU vanished, and an
// error that names the message if a message from QEMU is invalid or not supported. When Serve
// returns, all clients are closed and both sockets are removed. It can be called once.
func (b *Backend) Serve(ctx context.Context) error {
	b.mu.Lock()
	if b.serving || b.closed {
		b.mu.Unlock()
		return errors.New("backend was served or closed before")
	}
	b.serving = true
	b.mu.Unlock()
	defer b.release()
	stop := context.AfterFunc(ctx, b.interrupt)
	defer stop()
	err := b.loop()
	if errors.Is(err, errInterrupted) {
		return nil
	}
	return err
}

// Close ends Serve, waits until everything is released, and returns nil. It can be called at any
// time and more than once.
func (b *Backend) Close() error {
	b.mu.Lock()
	serving, closed := b.serving, b.closed
	b.closed = true
	b.mu.Unlock()
	switch {
	case serving:
		b.interrupt()
	case !closed:
		b.release()
	}
	<-b.finished
	return nil
}

var errInterrupted = errors.New("interrupted")

// interrupt makes loop return. The eventfd stays open until finished is closed.
func (b *Backend) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	signal(b.wake)
}

// release closes all descriptors and removes the sockets.
func (b *Backend) release() {
	for _, socket := range []*address.UnixSocket{b.listener, b.hybrid} {
		if socket != nil {
			socket.Close()
		}
	}
	if b.mux != nil {
		b.mux.close()
		b.device.close()
	}
	b.reader.close()
	closeFDs([]int{b.frontEnd})
	b.frontEnd = -1
	for _, s := range b.silent {
		unix.Close(s.fd)
	}
	b.silent = nil
	if b.poll != nil {
		b.poll.close()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	closeFDs([]int{b.wake})
	b.wake = -1
	close(b.finished)
}
