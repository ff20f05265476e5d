package remote

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"syscall"
	"time"
)

// Dial connects to a vsock port of the guest.
type Dial func(ctx context.Context, port uint32) (net.Conn, error)

// Client runs operations in one guest. It holds no connection between two calls and is safe for
// concurrent use. Every call ends with its context. A failure in the guest is returned as an
// [*Error].
type Client struct {
	dial Dial
}

// NewClient returns a client of the guest that dial reaches.
func NewClient(dial Dial) *Client { return &Client{dial: dial} }

// Exec runs a program and waits for its end. A program that ran and failed is not an error: look at
// Exit.
func (c *Client) Exec(ctx context.Context, cmd Command) (Exit, error) {
	return ask[Exit](ctx, c, OpExec, cmd)
}

// ReadFile reads a whole file, of MaxData bytes at most.
func (c *Client) ReadFile(ctx context.Context, path string) ([]byte, error) {
	data, err := c.ReadAt(ctx, path, 0, MaxData)
	if err == nil && len(data) == MaxData {
		return nil, fmt.Errorf("read %s: it holds %d bytes or more: read it in parts", path, MaxData)
	}
	return data, err
}

// ReadAt reads length bytes from offset on, fewer only at the file's end.
func (c *Client) ReadAt(ctx context.Context, path string, offset int64, length int) ([]byte, error) {
	data, err := ask[Data](ctx, c, OpReadFile, ReadFile{Path: path, Offset: offset, Length: length})
	if len(data.Data) > length {
		return nil, fmt.Errorf("read %s: the guest sent %d bytes where %d were asked for", path, len(data.Data), length)
	}
	return data.Data, err
}

// WriteFile writes a whole file, as os.WriteFile does. It also works for the kernel's files.
func (c *Client) WriteFile(ctx context.Context, path string, data []byte) error {
	return c.call(ctx, OpWriteFile, WriteFile{Path: path, Data: data, Truncate: true}, nil)
}

// WriteAt writes data at offset and leaves the rest of the file as it is.
func (c *Client) WriteAt(ctx context.Context, path string, offset int64, data []byte) error {
	return c.call(ctx, OpWriteFile, WriteFile{Path: path, Offset: offset, Data: data}, nil)
}

// Stat returns a file's status. It follows symbolic links.
func (c *Client) Stat(ctx context.Context, path string) (Stat, error) {
	return ask[Stat](ctx, c, OpStat, Path{path})
}

// StatFS returns the status of the filesystem that contains path.
func (c *Client) StatFS(ctx context.Context, path string) (StatFS, error) {
	return ask[StatFS](ctx, c, OpStatFS, Path{path})
}

// DeviceSize returns a block device's size in bytes, according to the guest's kernel.
func (c *Client) DeviceSize(ctx context.Context, device string) (uint64, error) {
	size, err := ask[Size](ctx, c, OpDeviceSize, Path{device})
	return size.Bytes, err
}

// DiskOffset returns where a file's content begins on its disk, which is the whole disk of a
// partition. The file must have been synced.
func (c *Client) DiskOffset(ctx context.Context, path string) (uint64, error) {
	offset, err := ask[Offset](ctx, c, OpDiskOffset, Path{path})
	return offset.Bytes, err
}

// Mkdir makes a directory and its parents. An existing directory is not an error.
func (c *Client) Mkdir(ctx context.Context, path string, mode fs.FileMode) error {
	return c.call(ctx, OpMkdir, Mkdir{Path: path, Mode: uint32(mode.Perm())}, nil)
}

// Mount mounts without the agent's knowledge.
func (c *Client) Mount(ctx context.Context, m Mount) error {
	return c.call(ctx, OpMount, m, nil)
}

// Unmount unmounts without the agent's knowledge.
func (c *Client) Unmount(ctx context.Context, path string, flags int) error {
	return c.call(ctx, OpUnmount, Unmount{Path: path, Flags: flags}, nil)
}

// ShutdownFS shuts a filesystem down by force; see [ShutdownFS] for the flags.
func (c *Client) ShutdownFS(ctx context.Context, path string, flags uint32) error {
	return c.call(ctx, OpShutdownFS, ShutdownFS{Path: path, Flags: flags}, nil)
}

// Grow grows a filesystem without the agent's knowledge, and returns the time that this took in the
// guest.
func (c *Client) Grow(ctx context.Context, g Grow) (time.Duration, error) {
	grown, err := ask[Grown](ctx, c, OpGrowFS, g)
	return time.Duration(grown.Nanoseconds), err
}

// Freeze freezes a filesystem and thaws it again.
func (c *Client) Freeze(ctx context.Context, path string) error {
	return c.call(ctx, OpFreezeFS, Freeze{Path: path}, nil)
}

// Sync writes all data of the filesystem that contains path to its disk (syncfs), or of all
// filesystems if path is empty.
func (c *Client) Sync(ctx context.Context, path string) error {
	return c.call(ctx, OpSync, Path{path}, nil)
}

// Now returns the guest's time, which the agent's conditions have, too.
func (c *Client) Now(ctx context.Context) (time.Time, error) {
	now, err := ask[Clock](ctx, c, OpClock, struct{}{})
	return time.UnixMilli(now.UnixMilliseconds), err
}

// Signal sends a signal to every process of a program, and returns their ids. It fails if there is
// no such process.
func (c *Client) Signal(ctx context.Context, program string, signal syscall.Signal) ([]int, error) {
	found, err := ask[Processes](ctx, c, OpSignal, Signal{Program: program, Signal: signal})
	return found.IDs, err
}

// Threads returns the threads of all processes of a program. It fails if there is no such process.
func (c *Client) Threads(ctx context.Context, program string) (ThreadStates, error) {
	return ask[ThreadStates](ctx, c, OpThreads, Threads{Program: program})
}

// DialVsock makes a connection from the guest; see [DialVsock].
func (c *Client) DialVsock(ctx context.Context, d DialVsock) (Dialed, error) {
	return ask[Dialed](ctx, c, OpDialVsock, d)
}

// Echo connects to the echo port. The caller closes the connection.
func (c *Client) Echo(ctx context.Context) (net.Conn, error) {
	return c.dial(ctx, EchoPort)
}

// BareEcho connects to the bare echo. The caller closes the connection.
func (c *Client) BareEcho(ctx context.Context) (net.Conn, error) {
	return c.dial(ctx, BareEchoPort)
}

// ask runs an operation with one answer, of type R.
func ask[R any](ctx context.Context, c *Client, op string, args any) (R, error) {
	var result R
	err := c.call(ctx, op, args, &result)
	return result, err
}

// call runs an operation with one answer, and stores the answer in result unless that is nil.
func (c *Client) call(ctx context.Context, op string, args, result any) error {
	s, err := c.begin(ctx, op, args)
	if err != nil {
		return err
	}
	defer s.end()
	done, err := s.next(result)
	if err != nil || done {
		return err
	}
	if done, err = s.next(nil); err == nil && !done {
		err = fmt.Errorf("%s: the guest's answer goes on after its result", op)
	}
	return err
}

// session is the connection of one running operation.
type session struct {
	ctx   context.Context
	op    string
	conn  net.Conn
	lines *Lines
	keep  func() bool // detaches the connection from the context
}

// begin connects and sends the request. From then on the end of the context closes the connection.
func (c *Client) begin(ctx context.Context, op string, args any) (*session, error) {
	raw, err := json.Marshal(args)
	if err != nil {
		return nil, fmt.Errorf("%s: encode: %w", op, err)
	}
	conn, err := c.dial(ctx, Port)
	if err != nil {
		return nil, fmt.Errorf("%s: reach the test guest: %w", op, err)
	}
	s := &session{ctx: ctx, op: op, conn: conn, lines: NewLines(conn)}
	s.keep = context.AfterFunc(ctx, func() { conn.Close() })
	if err := s.send(Request{Op: op, Args: raw}); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

func (s *session) send(r Request) error { return s.cause(s.lines.Send(r)) }

// next receives one reply into result and reports whether it was the last. A failure in the guest
// is an error, and the last reply.
func (s *session) next(result any) (done bool, err error) {
	var reply Reply
	if err := s.cause(s.lines.Receive(&reply)); err != nil {
		return true, err
	}
	if reply.Error != nil {
		return true, fmt.Errorf("%s: %w", s.op, reply.Error)
	}
	if result != nil && len(reply.Result) > 0 {
		if err := json.Unmarshal(reply.Result, result); err != nil {
			return true, fmt.Errorf("%s: decode the guest's answer: %w", s.op, err)
		}
	}
	return reply.Done, nil
}

// cause adds the operation's name to an error, and the context's error if the end of the context
// broke the connection.
func (s *session) cause(err error) error {
	switch {
	case err == nil:
		return nil
	case s.ctx.Err() != nil:
		return fmt.Errorf("%s: %w", s.op, context.Cause(s.ctx))
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%s: the guest ended the connection without an answer: %w", s.op, io.ErrUnexpectedEOF)
	default:
		return fmt.Errorf("%s: %w", s.op, err)
	}
}

func (s *session) end() {
	s.keep()
	s.conn.Close()
}
