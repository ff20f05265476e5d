package agentclient

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/service"
)

const (
	// The pause before a repeated attempt starts at firstPause and doubles up to longestPause.
	firstPause   = 10 * time.Millisecond
	longestPause = 200 * time.Millisecond
	// reasonLimit is how long to wait for the reason of a broken connection. The reason may become
	// known only after the break.
	reasonLimit = time.Second
)

// call makes a call. If the connection breaks, call repeats it until its deadline, unless a
// repetition could do harm.
func call[R any, PR service.Message[R]](ctx context.Context, c *Client, m method, request proto.Message) (PR, error) {
	ctx, cancel := c.limit(ctx)
	defer cancel()
	var before *failed
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		response, failed := attempt[R, PR](ctx, c, m, request)
		if failed == nil {
			return response, nil
		}
		if before != nil && failed.kind == broken && !failed.sent && ctx.Err() != nil {
			failed.err = before.err // the last attempt's error only says that time is up
		}
		before = failed
		if failed.kind != broken || failed.sent && !m.repeatable || !wait(ctx, pause) {
			return nil, c.failure(ctx, m, failed)
		}
	}
}

// failed describes an attempt without a good answer.
type failed struct {
	kind kind
	err  error // with a gRPC code
	sent bool  // the agent may have got the request
}

type kind uint8

const (
	broken   kind = iota // no answer: there was no connection, the connection ended, or time is up
	answered             // the agent answered with an error
	nonsense             // the data received is not a valid answer
)

// attempt makes a call once.
func attempt[R any, PR service.Message[R]](ctx context.Context, c *Client, m method, request proto.Message) (PR, *failed) {
	link, err := c.connected(ctx)
	if err != nil {
		return nil, &failed{kind: broken, err: status.Error(codes.Unavailable, err.Error())}
	}
	inTime := context.AfterFunc(ctx, link.conn.limitWrites)
	defer func() {
		if !inTime() {
			link.conn.relax()
		}
	}()
	hasAnswer, before := false, link.conn.requests()
	response, err := service.Call[R, PR](noting(ctx, &hasAnswer), link.client, m.service, m.name, request)
	if err == nil {
		return response, nil
	}
	return nil, link.failed(ctx, err, hasAnswer, link.conn.requests() != before)
}

// failed describes an attempt that ended with err. ctx is the attempt's.
func (l *link) failed(ctx context.Context, err error, hasAnswer, sent bool) *failed {
	f := &failed{kind: nonsense, err: err, sent: sent}
	violation := l.conn.violation()
	switch {
	case hasAnswer:
		f.kind = answered
	case violation != nil:
		f.err = status.Errorf(codes.Internal, "the guest's answer is invalid: %v", violation)
	case status.Code(err) == codes.Unavailable, ctx.Err() != nil:
		f.kind = broken
	}
	return f
}

// limit returns the context of one call. The context has a deadline, and ends with the client.
func (c *Client) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return c.whileAlive(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	ctx, stop := c.whileAlive(ctx)
	return ctx, func() {
		stop()
		cancel()
	}
}

// whileAlive returns a context that ends with ctx and with the client.
func (c *Client) whileAlive(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.life, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// wait waits for d and returns true, or returns false as soon as ctx ends.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
