// Package qmp is a client of QEMU's machine protocol: JSON lines over a unix socket, as docs/interop/qmp-spec in QEMU's
// sources has it. Commands carry an id and several may be in flight; every one has a deadline. Events go to subscribers.
//
// A Client outlives its connections. One that is cut is dialled again, and before a command may use the new one its Settle asks
// what is true now. A call that is given up, comes late or is cut off:
//
//	before its first byte was sent   ErrNotSent; the connection stays
//	when a part of it was sent       the connection ends; sent again by itself on the next one while its deadline allows
//	when it was sent, and then cut   ErrOutcomeUnknown; what only asks ("query-…", "qom-list", "qom-get") is asked again by itself
//	when it was sent, and given up   ErrOutcomeUnknown; its late answer belongs to nobody, as no id is given twice
//	while there is no connection     waits for the next one, until its deadline (ErrNotSent)
//	after QEMU's end, or Close       fails with why
//
// What the protocol does not do: a QMP socket serves one client, and one that comes second is neither served nor refused; it
// just gets no greeting (ErrNoGreeting). QEMU carries out the commands of a connection one after the other, and those of the next
// connection after them, so what is asked there is true of all that was sent before.
package qmp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultTimeout limits a command or a Dial whose context has no deadline, and a Settle.
const DefaultTimeout = 10 * time.Second

// The pauses between two connections that end early: none before the first, then from firstPause twice as long each time.
const (
	firstPause = 10 * time.Millisecond
	lastPause  = time.Second
)

var (
	// ErrNoGreeting is the failure of a Dial whose peer accepts and says nothing.
	ErrNoGreeting = errors.New("no greeting: another client holds the QMP socket, which serves one at a time (or QEMU hangs)")
	// ErrClosed is the end of a Client by Close.
	ErrClosed = errors.New("connection closed by this side")
	// ErrNotSent is the failure of a command that QEMU has not carried out, and never will: it was not sent, or not whole.
	ErrNotSent = errors.New("the command was not sent")
	// ErrOutcomeUnknown is the failure of a command that was sent and whose answer did not come: QEMU may have carried it out, or
	// may still do so. What is asked afterwards is true of it, as QEMU carries out one command after the other.
	ErrOutcomeUnknown = errors.New("outcome unknown")

	// errUnaddressed is the answer to what QEMU could not even read.
	errUnaddressed = errors.New("an answer without an id")
)

// Ask runs one command on a connection that nobody else uses yet, as Client.Execute does.
type Ask func(ctx context.Context, command string, arguments, result any) error

// Settle asks what is true on a new connection, before any other command may use it, and returns the events that were missed
// since the last one was lost. Subscribers get what the new connection says from its first byte on, so an event may come twice:
// once by itself, once from Settle. Where Settle fails, the connection is dialled again.
type Settle func(ctx context.Context, ask Ask) (missed []Event, err error)

// Client is a QMP client that dials again when its connection is lost. It is safe for concurrent use.
type Client struct {
	path    string
	settle  Settle
	version Version
	lastID  atomic.Uint64
	done    chan struct{} // closed when the Client has ended
	life    context.Context
	finish  context.CancelFunc

	mu            sync.Mutex
	conn          *connection   // nil while there is none that is settled
	number        uint64        // of connections that were settled
	changed       chan struct{} // closed, and made anew, when conn or err changes
	lost          error         // why the last connection ended
	err           error         // why the Client ended
	subscriptions map[*Subscription]struct{}
}

// Dial connects to the QMP socket at path, reads the greeting and leaves capabilities negotiation. The context limits the Dial,
// not the Client. Settle may be nil; it is for the connections after the first.
func Dial(ctx context.Context, path string, settle Settle) (*Client, error) {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	c := &Client{
		path: path, settle: settle, done: make(chan struct{}), changed: make(chan struct{}), number: 1,
		subscriptions: make(map[*Subscription]struct{}),
	}
	conn, err := connect(ctx, path, &c.lastID, c.publish)
	if err != nil {
		return nil, fmt.Errorf("qmp %s: %w", path, err)
	}
	c.conn, c.version = conn, conn.version
	c.life, c.finish = context.WithCancel(context.Background())
	go c.keep(conn)
	return c, nil
}

// withDeadline gives a context that has no deadline the default one.
func withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, DefaultTimeout)
}

// keep dials again whenever a connection ends, until the Client is closed or nobody listens any more.
func (c *Client) keep(conn *connection) {
	pause := time.Duration(0)
	for {
		<-conn.done
		if time.Since(conn.since) > lastPause {
			pause = 0
		}
		lost := conn.reason()
		c.mu.Lock()
		c.conn, c.lost = nil, lost
		c.mu.Unlock()
		next, err := c.redial(&pause)
		if err != nil {
			c.end(fmt.Errorf("%w; dialled again: %w", lost, err))
			return
		}
		conn = next
	}
}

// redial connects until it succeeds. It fails where nobody listens any more, which means that QEMU has ended, and after Close.
func (c *Client) redial(pause *time.Duration) (*connection, error) {
	for {
		select {
		case <-time.After(*pause):
		case <-c.life.Done():
			return nil, ErrClosed
		}
		*pause = min(max(2**pause, firstPause), lastPause)
		conn, err := c.connect()
		if err == nil {
			return conn, nil
		}
		if c.life.Err() != nil {
			return nil, ErrClosed
		}
		if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
			return nil, err
		}
	}
}

// connect makes the next connection and settles it. The greeting has no limit: QEMU serves us when it has seen the old
// connection's end, and a QEMU that ends refuses.
func (c *Client) connect() (*connection, error) {
	conn, err := connect(c.life, c.path, &c.lastID, c.publish)
	if err != nil {
		return nil, err
	}
	if c.settle != nil {
		ctx, cancel := context.WithTimeout(c.life, DefaultTimeout)
		defer cancel()
		missed, err := c.settle(ctx, func(ctx context.Context, command string, arguments, result any) error {
			return named(command, conn.execute(ctx, request{command: command, arguments: arguments}, result))
		})
		if err != nil {
			conn.end(err)
			return nil, err
		}
		for _, event := range missed {
			c.publish(event)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil { // closed meanwhile
		conn.end(c.err)
		return nil, c.err
	}
	c.conn = conn
	c.number++
	c.change()
	return conn, nil
}

// change wakes who waits for a connection. The lock is held.
func (c *Client) change() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// current waits for a connection.
func (c *Client) current(ctx context.Context) (*connection, error) {
	for {
		c.mu.Lock()
		conn, err, lost, changed := c.conn, c.err, c.lost, c.changed
		c.mu.Unlock()
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w: %w", ErrNotSent, err)
		case conn != nil && !conn.ended():
			return conn, nil
		case conn != nil:
			lost = conn.reason()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: the connection was lost (%w) and there is no other yet: %w", ErrNotSent, lost, ctx.Err())
		}
	}
}

// Execute runs a command and waits for its answer. Arguments may be nil, else it is what encoding/json makes an object of; the
// answer is decoded into result unless that is nil. A failure that QEMU answers is an *Error, for errors.As. When the context
// ends first (after DefaultTimeout where it has no deadline), the error says whether QEMU may carry out the command all the same
// (ErrOutcomeUnknown) or will not (ErrNotSent).
func (c *Client) Execute(ctx context.Context, command string, arguments, result any) error {
	return c.ExecuteWithFile(ctx, command, arguments, result, nil)
}

// ExecuteWithFile is Execute of a command that takes a file: add-fd or getfd. The file stays the caller's, who may close it
// afterwards; QEMU has a descriptor of its own for the same open file.
func (c *Client) ExecuteWithFile(ctx context.Context, command string, arguments, result any, file *os.File) error {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	for {
		conn, err := c.current(ctx)
		if err != nil {
			return named(command, err)
		}
		err = conn.execute(ctx, request{command, arguments, file}, result)
		again := errors.Is(err, ErrNotSent) || errors.Is(err, ErrOutcomeUnknown) && onlyAsks(command)
		if !again || ctx.Err() != nil || !conn.ended() {
			return named(command, err)
		}
	}
}

// onlyAsks reports whether a command changes nothing, so that it may be sent twice.
func onlyAsks(command string) bool {
	return strings.HasPrefix(command, "query-") || command == "qom-list" || command == "qom-get"
}

// named says of which command an error is.
func named(command string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("qmp %s: %w", command, err)
}

// Version returns QEMU's version, from its greeting.
func (c *Client) Version() Version { return c.version }

// Connection returns the number of the present connection, or of the last one: it changes with each that is lost and replaced,
// so that a caller of several commands knows whether something came between them.
func (c *Client) Connection() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.number
}

// Done returns a channel that is closed when the Client has ended: by Close, or because nobody listens on the socket any more.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns why the Client ended, nil while it has not. It wraps io.EOF where QEMU closed the last connection, as it does when
// it exits, and ErrClosed after Close.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the Client; commands in flight fail with ErrClosed. It may be called more than once.
func (c *Client) Close() error {
	c.end(ErrClosed)
	return nil
}

// end ends the Client; the first reason stays.
func (c *Client) end(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = reason
	c.finish()
	if c.conn != nil {
		c.conn.end(reason)
	}
	for s := range c.subscriptions {
		close(s.events)
	}
	clear(c.subscriptions)
	c.change()
	close(c.done)
}
