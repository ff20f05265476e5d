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
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// connection is one QMP connection, from its greeting to its end. It is not reused: the Client
// dials a new one.
type connection struct {
	conn    *net.UnixConn
	lines   *bufio.Scanner
	version Version
	since   time.Time
	lastID  *atomic.Uint64 // shared by the Client's connections, so that no id is used twice
	publish func(Event)
	writing chan struct{} // holds a token while a command is written
	done    chan struct{} // closed when the connection has ended

	mu      sync.Mutex
	err     error // why the connection ended
	pending map[uint64]chan message
}

func newConnection(conn *net.UnixConn, lastID *atomic.Uint64, publish func(Event)) *connection {
	c := &connection{
		conn: conn, lines: bufio.NewScanner(conn), since: time.Now(), lastID: lastID, publish: publish,
		writing: make(chan struct{}, 1), done: make(chan struct{}), pending: make(map[uint64]chan message),
	}
	c.lines.Buffer(nil, MaxLine)
	c.lines.Split(splitLines)
	return c
}

// connect opens a connection, reads the greeting and leaves capabilities negotiation. The context
// limits only that.
func connect(ctx context.Context, path string, lastID *atomic.Uint64, publish func(Event)) (*connection, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if errors.Is(err, unix.EAGAIN) { // the listener's backlog is full of waiting clients
		err = fmt.Errorf("%w: %w", ErrNoGreeting, err)
	}
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	c := newConnection(conn.(*net.UnixConn), lastID, publish)
	if err := c.greet(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	go c.read()
	if err := c.execute(ctx, request{command: "qmp_capabilities"}, nil); err != nil {
		c.end(err)
		return nil, err
	}
	return c, nil
}

// greet reads the greeting, until ctx ends.
func (c *connection) greet(ctx context.Context) error {
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
func (c *connection) nextLine() ([]byte, error) {
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

// read dispatches incoming lines until the connection ends.
func (c *connection) read() {
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

// dispatch delivers a message to the command or the subscribers that wait for it.
func (c *connection) dispatch(m *message) error {
	switch {
	case m.Greeting != nil:
		return errors.New("a second greeting")
	case m.Event != "":
		c.publish(Event{Name: m.Event, Data: m.Data, Time: time.Now()})
		return nil
	case m.ID == nil && m.Error != nil:
		return fmt.Errorf("%w: %w", errUnaddressed, m.Error)
	case m.ID == nil:
		return errUnaddressed
	}
	if *m.ID == 0 || *m.ID > c.lastID.Load() {
		return fmt.Errorf("an answer to command %d, which was never sent", *m.ID)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// If the command is not pending any more, its caller has given up.
	if answer, ok := c.pending[*m.ID]; ok {
		delete(c.pending, *m.ID)
		answer <- *m
	}
	return nil
}

// request is a command with its arguments, and the file to pass with it, if any.
type request struct {
	command   string
	arguments any
	file      *os.File
}

// execute sends a request, waits for its answer and decodes the answer into result, unless result
// is nil.
func (c *connection) execute(ctx context.Context, r request, result any) error {
	id, answer, err := c.register()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	defer c.forget(id)
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{r.command, r.arguments, id})
	if err != nil {
		return fmt.Errorf("encode the arguments: %w", err)
	}
	if err := c.write(ctx, append(line, '\n'), r.file); err != nil {
		return err
	}
	m, err := c.await(ctx, answer)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	if m.Error != nil {
		return m.Error
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(m.Return, result); err != nil {
		return fmt.Errorf("decode the answer: %w: %s", err, excerpt(m.Return))
	}
	return nil
}

// register allocates an id, and the channel on which its answer will arrive.
func (c *connection) register() (uint64, <-chan message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, nil, c.err
	}
	id, answer := c.lastID.Add(1), make(chan message, 1)
	c.pending[id] = answer
	return id, answer, nil
}

// forget removes a command. If its answer still arrives, it is ignored.
func (c *connection) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// write sends one line, with a file if that is not nil. If only a part of the line was sent, write
// ends the connection, because QEMU would take the next line for the rest of this one. QEMU carries
// a command out at its closing brace, one byte before the newline, and drops an incomplete command
// when its connection ends (monitor_qmp_event in monitor/qmp.c).
func (c *connection) write(ctx context.Context, line []byte, file *os.File) error {
	select {
	case c.writing <- struct{}{}:
		defer func() { <-c.writing }()
	case <-ctx.Done():
		return fmt.Errorf("%w: another command is being sent: %w", ErrNotSent, ctx.Err())
	case <-c.done:
		return fmt.Errorf("%w: %w", ErrNotSent, c.reason())
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	deadline, _ := ctx.Deadline()
	c.conn.SetWriteDeadline(deadline)
	sent, err := c.send(line, file)
	if err == nil {
		return nil
	}
	if errors.Is(err, errFile) {
		return fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	late := errors.Is(err, os.ErrDeadlineExceeded)
	if late { // the deadline is the context's, which may not have noticed it yet
		err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	if late && sent == 0 {
		return fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	if late {
		err = fmt.Errorf("QEMU does not read: %w", err)
	}
	c.end(err)
	if sent < len(line)-1 {
		return fmt.Errorf("%w: %w", ErrNotSent, err)
	}
	return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
}

// errFile is the failure to pass a file that is closed or being closed: its number may be another
// file's by now.
var errFile = errors.New("the file descriptor of the command")

// send writes a line, with a file's descriptor attached to its first byte (SCM_RIGHTS of unix(7)).
func (c *connection) send(line []byte, file *os.File) (sent int, err error) {
	if file != nil {
		var raw syscall.RawConn
		if raw, err = file.SyscallConn(); err != nil {
			return 0, fmt.Errorf("%w: %w", errFile, err)
		}
		held := raw.Control(func(fd uintptr) { sent, _, err = c.conn.WriteMsgUnix(line, unix.UnixRights(int(fd)), nil) })
		if held != nil {
			return 0, fmt.Errorf("%w: %w", errFile, held)
		}
		if err != nil {
			return sent, err
		}
	}
	rest, err := c.conn.Write(line[sent:])
	return sent + rest, err
}

// await waits for an answer.
func (c *connection) await(ctx context.Context, answer <-chan message) (message, error) {
	select {
	case m := <-answer:
		return m, nil
	case <-ctx.Done():
		return message{}, fmt.Errorf("no answer: %w", ctx.Err())
	case <-c.done:
	}
	select { // the answer may have arrived just before the end
	case m := <-answer:
		return m, nil
	default:
		return message{}, c.reason()
	}
}

// reason returns why the connection ended, or nil if it has not.
func (c *connection) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// ended reports whether the connection has ended.
func (c *connection) ended() bool { return c.reason() != nil }

// end ends the connection. If it has ended before, the first reason stays.
func (c *connection) end(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = reason
	c.conn.Close()
	close(c.done)
}
