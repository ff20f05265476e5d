// Package qmp is a client of QEMU's machine protocol: JSON lines over a unix socket, as docs/interop/qmp-spec in QEMU's
// sources has it. Commands carry an id and several may be in flight; every one has a deadline. Events go to subscribers.
//
// What the protocol does not do: a QMP socket serves one client, and one that comes second is neither served nor refused; it
// just gets no greeting (ErrNoGreeting). QEMU carries out the commands of a connection one after the other.
package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultTimeout limits a command or a Dial whose context has no deadline.
const DefaultTimeout = 10 * time.Second

var (
	// ErrNoGreeting is the failure of a Dial whose peer accepts and says nothing.
	ErrNoGreeting = errors.New("no greeting: another client holds the QMP socket, which serves one at a time (or QEMU hangs)")
	// ErrClosed is the end of a connection by Close.
	ErrClosed = errors.New("connection closed by this side")

	// errUnaddressed is the answer to what QEMU could not even read.
	errUnaddressed = errors.New("an answer without an id")
)

// Client is a QMP connection. It is safe for concurrent use.
type Client struct {
	conn    net.Conn
	lines   *bufio.Scanner
	version Version
	writing chan struct{} // holds a token while a command is written
	done    chan struct{} // closed when the connection has ended

	mu            sync.Mutex
	err           error // why the connection ended
	lastID        uint64
	pending       map[uint64]chan message
	subscriptions map[*Subscription]struct{}
}

// Dial connects to the QMP socket at path, reads the greeting and leaves capabilities negotiation. The context limits the
// Dial, not the connection.
func Dial(ctx context.Context, path string) (*Client, error) {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if errors.Is(err, unix.EAGAIN) { // the listener's backlog is full of those who wait already
		err = fmt.Errorf("%w: %w", ErrNoGreeting, err)
	}
	if err != nil {
		return nil, fmt.Errorf("qmp %s: connect: %w", path, err)
	}
	c := &Client{
		conn: conn, lines: bufio.NewScanner(conn),
		writing: make(chan struct{}, 1), done: make(chan struct{}),
		pending: make(map[uint64]chan message), subscriptions: make(map[*Subscription]struct{}),
	}
	c.lines.Buffer(nil, MaxLine)
	c.lines.Split(splitLines)
	if err := c.greet(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("qmp %s: %w", path, err)
	}
	go c.read()
	if err := c.Execute(ctx, "qmp_capabilities", nil, nil); err != nil {
		c.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// withDeadline gives a context that has no deadline the default one.
func withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, DefaultTimeout)
}

// greet reads the greeting, until the context ends.
func (c *Client) greet(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { c.conn.SetReadDeadline(time.Unix(1, 0)) })
	line, err := c.nextLine()
	if !stop() {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("%w: %w", ErrNoGreeting, ctx.Err())
		}
		return fmt.Errorf("wait for the greeting: %w", ctx.Err())
	}
	if err != nil {
		return fmt.Errorf("wait for the greeting: %w", err)
	}
	m, err := parseLine(line)
	if err != nil {
		return err
	}
	if m.Greeting == nil {
		return fmt.Errorf("want a greeting, got %s", excerpt(line))
	}
	v := m.Greeting.Version
	c.version = Version{Major: v.QEMU.Major, Minor: v.QEMU.Minor, Micro: v.QEMU.Micro, Package: v.Package}
	return nil
}

// nextLine returns the next line. It is valid until the next call.
func (c *Client) nextLine() ([]byte, error) {
	if c.lines.Scan() {
		return c.lines.Bytes(), nil
	}
	switch err := c.lines.Err(); {
	case err == nil:
		return nil, fmt.Errorf("QEMU closed the connection: %w", io.EOF)
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("a line of more than %d bytes: %w", MaxLine, err)
	default:
		return nil, err
	}
}

// read distributes what comes in until the connection ends.
func (c *Client) read() {
	for {
		line, err := c.nextLine()
		if err != nil {
			c.end(err)
			return
		}
		m, err := parseLine(line)
		if err != nil {
			c.end(err)
			return
		}
		if err := c.dispatch(&m); err != nil {
			c.end(err)
			return
		}
	}
}

// dispatch gives a message to who waits for it.
func (c *Client) dispatch(m *message) error {
	switch {
	case m.Greeting != nil:
		return errors.New("a second greeting")
	case m.Event != "":
		c.publish(m)
		return nil
	case m.ID == nil && m.Error != nil:
		return fmt.Errorf("%w: %w", errUnaddressed, m.Error)
	case m.ID == nil:
		return errUnaddressed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if *m.ID == 0 || *m.ID > c.lastID {
		return fmt.Errorf("an answer to command %d, which was never sent", *m.ID)
	}
	// A command that is no longer there is one whose caller gave up.
	if answer, ok := c.pending[*m.ID]; ok {
		delete(c.pending, *m.ID)
		answer <- *m
	}
	return nil
}

// Execute runs a command and waits for its answer. Arguments may be nil, else it is what encoding/json makes an object of; the
// answer is decoded into result unless that is nil. A failure that QEMU answers is an *Error, for errors.As. When the context
// ends first (after DefaultTimeout where it has no deadline), QEMU may still carry out the command.
func (c *Client) Execute(ctx context.Context, command string, arguments, result any) error {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	id, answer, err := c.register()
	if err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	defer c.forget(id)
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, arguments, id})
	if err != nil {
		return fmt.Errorf("qmp %s: encode the arguments: %w", command, err)
	}
	if err := c.write(ctx, append(line, '\n')); err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	m, err := c.await(ctx, answer)
	if err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	if m.Error != nil {
		return fmt.Errorf("qmp %s: %w", command, m.Error)
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(m.Return, result); err != nil {
		return fmt.Errorf("qmp %s: decode the answer: %w: %s", command, err, excerpt(m.Return))
	}
	return nil
}

// register makes an id, and the channel on which its answer will come.
func (c *Client) register() (uint64, <-chan message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, nil, c.err
	}
	c.lastID++
	answer := make(chan message, 1)
	c.pending[c.lastID] = answer
	return c.lastID, answer, nil
}

// forget drops a command: its answer, if one still comes, is ignored.
func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// write sends one line. A line that could not be sent whole ends the connection: what follows it would not be understood.
func (c *Client) write(ctx context.Context, line []byte) error {
	select {
	case c.writing <- struct{}{}:
		defer func() { <-c.writing }()
	case <-ctx.Done():
		return fmt.Errorf("wait for another command to be sent: %w", ctx.Err())
	case <-c.done:
		return c.Err()
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	c.conn.SetWriteDeadline(deadline)
	sent, err := c.conn.Write(line)
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if sent == 0 { // the caller's time was up: nothing of it is on its way
			return fmt.Errorf("the command was not sent: %w", err)
		}
		err = fmt.Errorf("QEMU does not read: %w", err)
	}
	c.end(err)
	return err
}

// await waits for an answer.
func (c *Client) await(ctx context.Context, answer <-chan message) (message, error) {
	select {
	case m := <-answer:
		return m, nil
	case <-ctx.Done():
		return message{}, fmt.Errorf("no answer: %w", ctx.Err())
	case <-c.done:
	}
	select { // the answer may have come just before the end
	case m := <-answer:
		return m, nil
	default:
		return message{}, c.Err()
	}
}

// Version returns QEMU's version, from its greeting.
func (c *Client) Version() Version { return c.version }

// Done returns a channel that is closed when the connection has ended, for whatever reason.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns why the connection ended, nil while it has not. It wraps io.EOF where QEMU closed it, as it does when it exits,
// and ErrClosed after Close.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection; commands in flight fail with ErrClosed. It may be called more than once.
func (c *Client) Close() error {
	c.end(ErrClosed)
	return nil
}

// end ends the connection; the first reason stays.
func (c *Client) end(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = reason
	c.conn.Close()
	for s := range c.subscriptions {
		close(s.events)
	}
	clear(c.subscriptions)
	close(c.done)
}
