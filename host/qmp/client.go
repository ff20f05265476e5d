// Package qmp is a client of QEMU's machine protocol: JSON lines over a unix socket, specified by
// docs/interop/qmp-spec in QEMU's sources. Commands carry an id, and several may be in flight.
// Every command has a deadline. Subscribers receive events.
//
// A Client outlives its connections. When a connection is lost, the Client dials again, and calls
// Settle on the new connection before any command may use it. A command whose connection is lost,
// or whose caller gives up, ends as follows:
//
//	before its first byte was sent    ErrNotSent; the connection stays
//	when a part of it was sent        the connection ends; the Client sends it again on the next one, until its deadline
//	when sent, then connection lost   ErrOutcomeUnknown; the Client repeats queries ("query-…", "qom-list", "qom-get")
//	when sent, then given up          ErrOutcomeUnknown; a late answer is ignored, because no id is used twice
//	while there is no connection      waits for the next connection, until its deadline (ErrNotSent)
//	after QEMU's end, or Close        fails with the reason
//
// Limits of the protocol: a QMP socket serves one client. It neither serves nor refuses a second
// client; that client just gets no greeting (ErrNoGreeting). QEMU carries out the commands of a
// connection in order, and the commands of the next connection after them. So a query's answer
// reflects all commands sent before it.
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

// Limits of the pause before a new connection. There is no pause before the first attempt; then the
// pause starts at firstPause and doubles each time.
const (
	firstPause = 10 * time.Millisecond
	lastPause  = time.Second
)

var (
	// ErrNoGreeting is the failure of a Dial whose peer accepts the connection and sends nothing.
	ErrNoGreeting = errors.New("no greeting: another client uses the QMP socket, which serves one client at a time, or QEMU hangs")
	// ErrClosed is the reason of a Client that ended by Close.
	ErrClosed = errors.New("connection closed by this side")
	// ErrNotSent is the failure of a command that was not sent, or not completely. QEMU has not
	// carried it out and never will.
	ErrNotSent = errors.New("the command was not sent")
	// ErrOutcomeUnknown is the failure of a command that was sent and got no answer. QEMU may have
	// carried it out, or may still do so. A later query shows the truth, because QEMU carries out
	// commands in order.
	ErrOutcomeUnknown = errors.New("outcome unknown")

	// errUnaddressed is QEMU's answer to a line that QEMU could not parse.
	errUnaddressed = errors.New("an answer without an id")
)

// Ask runs one command on a connection that nothing else uses yet, like Client.Execute.
type Ask func(ctx context.Context, command string, arguments, result any) error

// Settle runs queries on a new connection, before any other command may use it, and returns the
// events missed since the last connection was lost. Subscribers receive the new connection's events
// from the beginning, so an event may arrive twice: once from QEMU, once from Settle. If Settle
// fails, the Client dials again.
type Settle func(ctx context.Context, ask Ask) (missed []Event, err error)

// Client is a QMP client that dials again when its connection is lost. It is safe for concurrent
// use.
type Client struct {
	path    string
	settle  Settle
	version Version
	lastID  atomic.Uint64
	done    chan struct{} // closed when the Client has ended
	life    context.Context
	finish  context.CancelFunc

	mu            sync.Mutex
	conn          *connection   // nil while there is no settled connection
	number        uint64        // number of settled connections so far
	changed       chan struct{} // closed and replaced when conn or err changes
	lost          error         // why the last connection ended
	err           error         // why the Client ended
	subscriptions map[*Subscription]struct{}
}

// Dial connects to the QMP socket at path, reads the greeting and leaves capabilities negotiation.
// The context limits Dial alone, not the Client. settle is called for every connection after the
// first; it may be nil.
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

// withDeadline adds the default deadline to a context that has none.
func withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, DefaultTimeout)
}

// keep dials again whenever a connection ends, until the Client is closed or nothing listens any
// more.
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

// redial connects, repeatedly if necessary. It fails after Close, and if nothing listens any more,
// which means that QEMU has ended.
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

// connect makes the next connection and settles it. It waits for the greeting without a limit: QEMU
// sends the greeting when it has seen the end of the old connection, and a QEMU that ends refuses
// the connection.
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
	if c.err != nil { // the Client was closed meanwhile
		conn.end(c.err)
		return nil, c.err
	}
	c.conn = conn
	c.number++
	c.change()
	return conn, nil
}

// change wakes all callers that wait for a connection. The caller must hold the lock.
func (c *Client) change() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// current returns the present connection, or waits for the next one.
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
			return nil, fmt.Errorf("%w: the connection was lost (%w) and is not restored yet: %w", ErrNotSent, lost, ctx.Err())
		}
	}
}

// Execute runs a command and waits for its answer. arguments is nil or encodes to a JSON object;
// the answer is decoded into result unless result is nil. If QEMU answers with an error, the error
// is an *Error, for errors.As. If the context ends first (after DefaultTimeout if it has no
// deadline), the error says whether QEMU may still carry out the command (ErrOutcomeUnknown) or
// will not (ErrNotSent).
func (c *Client) Execute(ctx context.Context, command string, arguments, result any) error {
	return c.ExecuteWithFile(ctx, command, arguments, result, nil)
}

// ExecuteWithFile is Execute for a command that takes a file: add-fd or getfd. The caller keeps the
// file and may close it afterwards; QEMU gets its own descriptor of the same open file.
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

// onlyAsks reports whether a command changes nothing and so may be sent twice.
func onlyAsks(command string) bool {
	return strings.HasPrefix(command, "query-") || command == "qom-list" || command == "qom-get"
}

// named adds the command's name to an error.
func named(command string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("qmp %s: %w", command, err)
}

// Version returns QEMU's version, from its greeting.
func (c *Client) Version() Version { return c.version }

// Connection returns the number of the present connection, or of the last one if there is none.
// Each new connection has a new number, so a caller of several commands can detect whether the
// connection was replaced between them.
func (c *Client) Connection() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.number
}

// Done returns a channel that is closed when the Client has ended: by Close, or because nothing
// listens on the socket any more.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns why the Client ended, or nil if it has not. The error wraps io.EOF if QEMU closed the
// last connection, as it does on exit, and ErrClosed after Close.
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

// end ends the Client. If it has ended before, the first reason stays.
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
