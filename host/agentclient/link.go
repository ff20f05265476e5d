package agentclient

import (
	"context"
	"net"
	"sync/atomic"
	"time"

	"github.com/containerd/ttrpc"
)

// dialLimit limits one attempt to connect. A booting guest may lose the request and never answer
// it; a new attempt may then succeed.
const dialLimit = 5 * time.Second

// link is one connection to the agent.
type link struct {
	conn   *guardedConn
	client *ttrpc.Client
	ended  atomic.Bool
}

// connected returns the connection. If there is none, or it has ended, connected dials once.
func (c *Client) connected(ctx context.Context) (*link, error) {
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if c.life.Err() != nil { // ctx ends a moment after life
		return nil, context.Cause(c.life)
	}
	if c.link != nil && !c.link.ended.Load() {
		return c.link, nil
	}
	l, err := c.dial(ctx, newGuardedConn)
	if err == nil {
		c.link = l
	}
	return l, err
}

// dial dials once. guarded makes the connection a guarded one, for calls or for a stream.
func (c *Client) dial(ctx context.Context, guarded func(net.Conn, time.Duration) *guardedConn) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	conn, err := c.address.Dial(ctx)
	if err != nil {
		return nil, err
	}
	l := &link{conn: guarded(conn, c.timeout)}
	l.client = ttrpc.NewClient(l.conn, ttrpc.WithUnaryClientInterceptor(noteAnswer), ttrpc.WithOnClose(func() { l.ended.Store(true) }))
	return l, nil
}

// close ends the connection, and its calls.
func (l *link) close() {
	l.ended.Store(true)
	l.client.Close()
}

type noteKey struct{}

// noting returns a context for a call. It makes noteAnswer set answered when the agent has
// answered, even with an error.
func noting(ctx context.Context, answered *bool) context.Context {
	return context.WithValue(ctx, noteKey{}, answered)
}

// noteAnswer distinguishes the agent's errors from the connection's, because both have the same
// codes.
func noteAnswer(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	err := invoke(ctx, request, response)
	if note, ok := ctx.Value(noteKey{}).(*bool); ok {
		*note = err == nil
	}
	return err
}
