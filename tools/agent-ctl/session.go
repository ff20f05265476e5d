package main

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/address"
)

// session is one connection to an agent, for one call at a time.
type session struct {
	to      address.Address
	client  *ttrpc.Client
	timeout time.Duration // of a call; 0 means none
	over    chan struct{} // closed when the client has seen the end of the connection
	lost    bool          // a call has failed because the connection was lost, which may be known before over is closed
	hint    string        // printed if the connection ends before its first answer
	forget  func() bool   // detaches the connection from dial's context
}

// dial connects to the agent. The connection ends when ctx ends.
func dial(ctx context.Context, to address.Address, timeout time.Duration) (*session, error) {
	limited, cancel := limit(ctx, timeout)
	defer cancel()
	conn, err := to.Dial(limited)
	if err != nil {
		return nil, err
	}
	s := &session{to: to, timeout: timeout, over: make(chan struct{}), hint: hint(to)}
	s.client = ttrpc.NewClient(limitedConn{conn, timeout}, ttrpc.WithOnClose(func() { close(s.over) }))
	s.forget = context.AfterFunc(ctx, func() { conn.Close() })
	return s, nil
}

func (s *session) close() {
	s.forget()
	s.client.Close()
}

// ended reports whether the connection has ended.
func (s *session) ended() bool {
	select {
	case <-s.over:
		return true
	default:
		return s.lost
	}
}

// call makes a call. It returns the response, or the status of the error.
func (s *session) call(ctx context.Context, c call) (proto.Message, *status.Status) {
	limited, cancel := limit(ctx, s.timeout)
	defer cancel()
	response := c.NewResponse()
	err := s.client.Call(limited, c.Service, c.Method, c.request, response)
	if err == nil {
		s.hint = ""
		return response, nil
	}
	return nil, s.failed(ctx, limited, "answer", err)
}

// stream makes a call that is answered with a stream, and calls each for each of its messages. It
// returns the status of the error that ended the stream, or nil, and as an error that of each, or
// of the dial. The call has a connection of its own: the agent notices only by the connection's end
// that nobody waits for the stream any more, and then thaws what the call has frozen.
func (s *session) stream(ctx context.Context, c call, each func(proto.Message) error) (*status.Status, error) {
	own, err := dial(ctx, s.to, s.timeout)
	if err != nil {
		return nil, err
	}
	defer own.close()
	st, err := own.receive(ctx, c, each)
	s.lost = s.lost || own.lost
	return st, err
}

// receive is stream on the session's connection, which is of no further use afterwards.
func (s *session) receive(ctx context.Context, c call, each func(proto.Message) error) (*status.Status, error) {
	limited, cancel := limit(ctx, s.timeout)
	defer cancel()
	missing := "answer"
	stream, err := s.client.NewStream(limited, &ttrpc.StreamDesc{StreamingServer: true}, c.Service, c.Method, c.request)
	for err == nil {
		message := c.NewResponse()
		if err = stream.RecvMsg(message); err != nil {
			break
		}
		s.hint, missing = "", "end of the answers"
		if err := each(message); err != nil {
			return nil, err
		}
	}
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	return s.failed(ctx, limited, missing, err), nil
}

// failed returns the status for an error of ttrpc's client. limited is ctx with the call's
// limit; missing names what did not come in time.
func (s *session) failed(ctx, limited context.Context, missing string, err error) *status.Status {
	var network *net.OpError
	st, answered := status.FromError(err)
	switch {
	case answered:
		s.hint = ""
		return st
	case ctx.Err() != nil:
		return status.New(codes.Canceled, "interrupted")
	case limited.Err() != nil, errors.Is(err, os.ErrDeadlineExceeded): // the deadline of a write, which may pass before the context's
		return status.Newf(codes.DeadlineExceeded, "no %s within %v: a larger --timeout waits longer", missing, s.timeout)
	case errors.Is(err, ttrpc.ErrClosed), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &network):
		s.lost = true
		return status.New(codes.Unavailable, "the connection ended"+s.hint+": "+err.Error())
	default:
		return status.New(codes.Internal, "malformed answer: "+err.Error())
	}
}

func limit(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeout)
}

// limitedConn gives up on an agent that does not read, because ttrpc writes without a limit. A
// partial write ends the connection.
type limitedConn struct {
	net.Conn
	timeout time.Duration
}

func (c limitedConn) Write(p []byte) (int, error) {
	if c.timeout > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
			return 0, err
		}
	}
	n, err := c.Conn.Write(p)
	if err != nil {
		c.Close()
	}
	return n, err
}
