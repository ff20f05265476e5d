// Package vhostvsock is a virtio socket device that lives in a process of its
// own: the back end of QEMU's vhost-user-vsock-pci, for hosts that have no
// /dev/vhost-vsock. One Backend serves one virtual machine.
//
// On one side it speaks the vhost-user protocol (QEMU's
// docs/interop/vhost-user.rst) and serves the rx and tx queues of a virtio
// socket device (virtio 1.2, section 5.10; linux/virtio_vsock.h and
// linux/virtio_ring.h). On the other side it has one unix socket in
// Firecracker's hybrid dialect: a client says "CONNECT <port>\n", reads
// "OK <number>\n" once a process in the guest has accepted, and has a byte
// stream to it from there on. A port that nobody listens on closes the client
// without an answer. Connections that the guest begins are refused, datagrams
// and SOCK_SEQPACKET are not offered, and QEMU keeps the event queue.
//
// Everything the guest writes is distrusted: each address, length and index is
// checked before it is used, a packet that breaks the rules ends its
// connection, and a malformed ring ends the device until the guest's driver
// starts it anew. A bug of ours that such bytes find ends no more than that. The
// front end, which owns the guest, is trusted to describe its memory, but not to
// get its messages right.
//
// One goroutine does it all, with epoll(7) and without a lock: a packet goes
// between the guest's memory and a client's socket in one system call, with no
// other goroutine to wake. No step blocks. A client that does not read stops
// only its own connection: what the guest sent it meanwhile is buffered, up to
// the credit that the guest was given, and the tx queue is always drained.
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

// Config says what a Backend serves.
type Config struct {
	Socket   string // where QEMU connects; made by Listen
	UDSPath  string // where clients connect; made by Listen
	GuestCID uint64 // the guest's address: 3 to 2^32-2

	// Log gets a line for what an operator should know, and at its debug level
	// for each connection that ends early. Nil is silence.
	Log logrus.FieldLogger
}

// ErrFrontEndGone is what Serve ends with when QEMU closed its connection
// without having stopped the device: it crashed or was killed.
var ErrFrontEndGone = errors.New("QEMU closed the connection while the device was running")

// Backend is a listening device. It serves one front end, once: the first that
// sends a message. Whoever comes after is refused, and QEMU cannot take up a device
// again whose backend it lost. Where descriptors run out, who connects has to wait;
// a client that has waited for slotLimit loses its slot.
type Backend struct {
	cfg  Config
	log  logrus.FieldLogger
	poll *poller
	wake int // an eventfd that ends Serve

	listener *address.UnixSocket // for the front end
	silent   []silentFrontEnd    // who connected there and has not said a word
	silentID uint32
	frontEnd int // -1 before one of them spoke
	reader   messageReader
	device   *device

	hybrid      *address.UnixSocket // for the clients
	mux         *mux
	more        bool // a queue was left with work to do
	stalled     bool // somebody waits because accept failed
	saidStalled bool

	clock func() time.Duration // monotonic
	swept time.Duration        // when clients were last looked at for waiting too long

	mu       sync.Mutex
	serving  bool
	closed   bool
	finished chan struct{} // closed when everything is released
}

// Check says what is wrong with a configuration, before anything is made.
func (cfg Config) Check() error {
	if cfg.GuestCID <= hostCID || cfg.GuestCID >= 1<<32-1 {
		return fmt.Errorf("guest CID %d: want 3 to 4294967294, the others have meanings of their own", cfg.GuestCID)
	}
	if cfg.Socket == cfg.UDSPath {
		return fmt.Errorf("socket %s: QEMU and the clients need one each", cfg.Socket)
	}
	return nil
}

// Listen makes both sockets, as address.ListenUnix does. They are at their paths
// when it returns, UDSPath first.
// The caller must call Serve or Close.
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

// Serve waits for QEMU and serves it until it disconnects. It returns nil when
// QEMU stopped the device first, when ctx ends and after Close;
// ErrFrontEndGone when QEMU vanished; and an error that names the message when
// QEMU and the backend do not understand each other. All clients are closed
// and both sockets removed when it returns. It can be called once.
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

// Close ends Serve, waits until everything is released, and returns nil. It
// can be called at any time and more than once.
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

// interrupt makes loop return. The eventfd is open as long as finished is.
func (b *Backend) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	signal(b.wake)
}

// release closes and removes everything.
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
