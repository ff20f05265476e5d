package server

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"runtime/debug"
	"slices"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// Call says how a method is answered.
type Call struct {
	// Answer decodes the request, and returns the response or a status. It runs in a goroutine of
	// its own.
	Answer ttrpc.Method

	// Stream, if its Handler is set, answers with a stream of messages instead of Answer. Its
	// context ends when a Shutdown begins.
	Stream ttrpc.Stream

	// Quick, if set, answers the call in the goroutine that has read its frame, or declines it;
	// then Answer answers it. transport.Quick documents how long it may take. Timed is set if Quick
	// takes long enough to be worth measuring.
	Quick transport.Quick
	Timed bool

	Ordered bool // it changes who holds which storage: calls begin in the order of arrival
	Always  bool // it is also answered before the guest is ready and while the agent ends
}

// Calls are the methods that are routed, by service and name. The names must be fixed in the
// program, because they become labels of metrics.
type Calls map[string]map[string]Call

// routed is a call with its counts.
type routed struct {
	Call
	name   string
	counts *metrics.Method
	server *Server
}

// methods are the methods of one service; table has those of all services.
type (
	methods map[string]*routed
	table   map[string]methods
)

func (s *Server) routes(calls Calls) table {
	t := table{}
	for service, all := range calls {
		t[service] = methods{}
		for name, call := range all {
			t[service][name] = &routed{call, name, s.Counts.Of(name), s}
		}
	}
	return t
}

// of returns the method that answers a request, or nil.
func (t table) of(r *ttrpcframe.Request) *routed { return t[string(r.Service)][string(r.Method)] }

// answers returns the methods in the form that ttrpc's server takes.
func (m methods) answers() map[string]ttrpc.Method {
	all := map[string]ttrpc.Method{}
	for name, r := range m {
		if r.Answer != nil {
			all[name] = r.answer
		}
	}
	return all
}

// streams returns the methods that answer with a stream, in the form that ttrpc's server takes.
func (m methods) streams() map[string]ttrpc.Stream {
	all := map[string]ttrpc.Stream{}
	for name, r := range m {
		if r.Stream.Handler != nil {
			all[name] = ttrpc.Stream{Handler: r.stream, StreamingClient: r.Stream.StreamingClient, StreamingServer: r.Stream.StreamingServer}
		}
	}
	return all
}

// behind returns the routes restricted to calls that are not in the table.
func (s *Server) behind(routes []transport.Route) (all []transport.Route) {
	for _, route := range routes {
		has := route.Has
		route.Has = func(r *ttrpcframe.Request) bool { return s.table.of(r) == nil && has(r) }
		all = append(all, route)
	}
	return all
}

// whileEnding returns the routes behind one that has all their calls while the server ends, and
// refuses them.
func (s *Server) whileEnding(routes []transport.Route) []transport.Route {
	if len(routes) == 0 {
		return nil
	}
	refusing := transport.Route{Serve: refuseAll, Has: func(r *ttrpcframe.Request) bool {
		return s.isEnding() && slices.ContainsFunc(routes, func(route transport.Route) bool { return route.Has(r) })
	}}
	return append([]transport.Route{refusing}, routes...)
}

// isEnding reports whether new calls are refused.
func (s *Server) isEnding() bool {
	if !s.calls.TryRLock() {
		return true
	}
	s.calls.RUnlock()
	return false
}

// refusal is the text for a call that is refused because the server ends.
const refusal = "the agent is ending; nothing was done: call again"

// refuseAll answers all calls of a lane UNAVAILABLE, until the connection ends.
func refuseAll(lane net.Conn) {
	defer lane.Close()
	calls := bufio.NewReader(lane)
	head := make([]byte, ttrpcframe.HeaderBytes)
	for {
		if _, err := io.ReadFull(calls, head); err != nil {
			return
		}
		header := ttrpcframe.ParseHeader(head)
		if _, err := io.CopyN(io.Discard, calls, int64(header.Length)); err != nil {
			return
		}
		if _, err := lane.Write(ttrpcframe.AppendError(nil, header.StreamID, codes.Unavailable, refusal)); err != nil {
			return
		}
	}
}

func (s *Server) isOrdered(r *ttrpcframe.Request) bool {
	to := s.table.of(r)
	return to != nil && to.Ordered
}

// quick answers a call in the goroutine that has read its frame; it is a transport.Quick. It also
// declines calls that fail or panic.
func (s *Server) quick(r *ttrpcframe.Request) (response []byte, ok bool) {
	to := s.table.of(r)
	if to == nil || to.Quick == nil {
		return nil, false
	}
	if !to.Always {
		if !s.isReady() || !s.calls.TryRLock() {
			return nil, false
		}
		defer s.calls.RUnlock()
	}
	defer func() {
		if p := recover(); p != nil {
			to.panicked(p)
			response, ok = nil, false
		}
	}()
	if to.Timed {
		return to.timed(r)
	}
	if response, ok = to.Quick(r); ok {
		to.counts.Count(codes.OK)
	}
	return response, ok
}

// timed is Quick with a measurement of its duration.
func (to *routed) timed(r *ttrpcframe.Request) (response []byte, ok bool) {
	began := time.Now()
	if response, ok = to.Quick(r); ok {
		to.counts.Observe(codes.OK, time.Since(began))
		to.server.Log.Debug(to.name)
	}
	return response, ok
}

// answer answers a call of ttrpc's server, counts it and logs it.
func (to *routed) answer(ctx context.Context, decode func(any) error) (any, error) {
	began := time.Now()
	response, err := to.safely(ctx, decode)
	code := status.Code(err)
	to.counts.Observe(code, time.Since(began))
	switch {
	case err != nil:
		to.server.Log.WithField("code", code).Warnf("%s: %s", to.name, status.Convert(err).Message())
	case !to.Always:
		to.server.Log.Debug(to.name)
	}
	return response, err
}

// stream answers a call of ttrpc's server with a stream, counts it when it ends, and logs it.
func (to *routed) stream(ctx context.Context, stream ttrpc.StreamServer) (any, error) {
	to.server.Log.Debug(to.name)
	last, err := to.streamSafely(ctx, stream)
	code := status.Code(err)
	to.counts.Count(code) // a stream's duration is the caller's choice
	if err != nil {
		to.server.Log.WithField("code", code).Warnf("%s: %s", to.name, status.Convert(err).Message())
	}
	return last, err
}

// streamSafely answers with a stream until it ends, its caller gives up, or a Shutdown begins.
func (to *routed) streamSafely(ctx context.Context, stream ttrpc.StreamServer) (last any, err error) {
	defer func() {
		if p := recover(); p != nil {
			last, err = nil, to.panicked(p)
		}
	}()
	s := to.server
	if !s.calls.TryRLock() {
		return nil, status.Errorf(codes.Unavailable, "%s: %s", to.name, refusal)
	}
	defer s.calls.RUnlock()
	if err := s.awaitReady(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	last, err = to.Stream.Handler(ctx, stream)
	if s.life.Err() != nil && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled) {
		err = status.Errorf(codes.Unavailable, "%s: the agent is ending: call again", to.name)
	}
	return last, err
}

// safely turns a panic into an answer: ttrpc does not, and PID 1 must not die.
func (to *routed) safely(ctx context.Context, decode func(any) error) (response any, err error) {
	defer func() {
		if p := recover(); p != nil {
			response, err = nil, to.panicked(p)
		}
	}()
	if to.Always {
		return to.Answer(ctx, decode)
	}
	return to.inOrder(ctx, decode)
}

// inOrder answers a call after the guest is ready and the calls before it have joined their queues.
func (to *routed) inOrder(ctx context.Context, decode func(any) error) (any, error) {
	s := to.server
	if !s.calls.TryRLock() {
		return nil, status.Errorf(codes.Unavailable, "%s: %s", to.name, refusal)
	}
	defer s.calls.RUnlock()
	call, err := s.order.Claim(ctx)
	if err != nil {
		return nil, err
	}
	defer call.End()
	if err = s.awaitReady(ctx); err != nil {
		return nil, err
	}
	if ctx, err = call.Begin(ctx); err != nil {
		return nil, err
	}
	return to.Answer(ctx, decode)
}

// panicked logs a panic, and returns the error for its caller. It is called in a deferred function,
// so the stack is that of the panic.
func (to *routed) panicked(p any) error {
	to.server.Log.Errorf("%s: panic: %v\n%s", to.name, p, debug.Stack())
	return status.Errorf(codes.Internal, "%s: the agent has a bug, its log says more", to.name)
}

// isReady reports whether awaitReady would return at once.
func (s *Server) isReady() bool {
	if s.Ready == nil {
		return true
	}
	select {
	case <-s.Ready:
		return true
	default:
		return false
	}
}

// awaitReady waits for Ready until ctx ends.
func (s *Server) awaitReady(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return status.Errorf(codes.DeadlineExceeded, "its deadline had passed when it arrived: call again with a longer one: %v", err)
	}
	if s.Ready == nil {
		return nil
	}
	select {
	case <-s.Ready:
		return nil
	case <-ctx.Done():
		return status.Errorf(codes.DeadlineExceeded, "the guest is still loading its modules: %v", ctx.Err())
	}
}
