// Package server answers the host's calls: it listens, routes each call by its service and method,
// and ends the calls in flight when the agent ends.
//
// It uses agent/transport, which is a separate package: transport handles sockets, frames, and how
// much of the guest's memory connections may take. It knows no method names, and also serves the
// log's readers and the debug console, which make no calls. This package processes calls, by the
// table that agent/rpc provides:
//
//	its frame is here     Quick answers it in the goroutine that has read it, or declines it
//	declined              ttrpc's server gives it a goroutine. It waits until the guest is ready, and if it is
//	                      Ordered until the calls before it have joined (agent/arrival). Answer answers it
//	not in the table      it goes, frame by frame, to the first Route that has it; else ttrpc's server answers
//	                      UNIMPLEMENTED. (A relay to another agent is such a route.)
//	it panics             it is answered INTERNAL, and nothing else happens: the agent may be PID 1
//
// During a Shutdown:
//
//	a call in flight      is answered, or cut if it takes longer than Shutdown may
//	a stream              is ended, and its caller told so
//	a new call            is refused with UNAVAILABLE: nothing was done. Health's calls are answered
//	a call of a Route     is treated in the same way, in flight and new
//	answered, unread      its connection stays open until the host hangs up, lingerLimit at most
//	Shutdown, again       returns at once: everything has ended
package server

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/arrival"
	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/address"
)

const (
	// answerLimit bounds the wait until the last answers are written.
	answerLimit = time.Second
	// lingerLimit is how long the connections stay open after the last answers.
	lingerLimit = 200 * time.Millisecond
	// hangUpLimit is how long the host may take to hang up after the last answer.
	hangUpLimit = 5 * time.Second
)

// Server answers calls. All exported fields must be set before Listen.
type Server struct {
	Log    *logrus.Entry   // must be set
	Ready  <-chan struct{} // closed when the guest is ready; calls wait for it. Nil means ready
	Counts *metrics.Calls  // counts the answered calls; nil discards the counts

	table    table
	relays   bool          // there are routes
	order    arrival.Order // of the calls, in the order in which transport reads them
	listener *transport.Listener
	ttrpc    *ttrpc.Server
	calls    sync.RWMutex // each call in progress holds it for reading
	ending   sync.Once
	life     context.Context // of the streams; ends when a Shutdown begins
	end      context.CancelFunc
}

// Listen starts to listen at an address. Calls wait in their connections until Serve. Calls that
// are not in calls go to routes. The caller ends the server by Shutdown or Close.
func (s *Server) Listen(at address.Address, calls Calls, routes ...transport.Route) error {
	if s.Counts == nil {
		s.Counts = new(metrics.Calls)
	}
	s.table = s.routes(calls)
	s.order.Of = s.isOrdered
	s.life, s.end = context.WithCancel(context.Background())
	var err error
	if s.ttrpc, err = ttrpc.NewServer(); err != nil {
		return err
	}
	for name, methods := range s.table {
		s.ttrpc.RegisterService(name, &ttrpc.ServiceDesc{Methods: methods.answers(), Streams: methods.streams()})
	}
	s.relays = len(routes) > 0
	s.listener, err = transport.Listen(at, s.quick, &s.order, s.Log, s.whileEnding(s.behind(routes))...)
	return err
}

// Serve answers calls until the server is closed or fails. Only Shutdown and Close end the calls in
// flight.
func (s *Server) Serve() error { return s.ttrpc.Serve(context.Background(), s.listener) }

// Addr returns the address of the listener.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Close ends the server at once and cuts the calls in flight.
func (s *Server) Close() error {
	s.end()
	return errors.Join(s.ttrpc.Close(), s.listener.Close())
}

// Shutdown refuses new calls, waits for those in flight until ctx ends, and closes the connections.
// If a client does not read its answers, closing takes about 2 s more; if there are routes,
// Shutdown first waits for it until ctx ends. Shutdown returns nil even if calls were cut.
func (s *Server) Shutdown(ctx context.Context) (err error) {
	s.ending.Do(func() {
		s.end()
		// First, because ttrpc regards a connection as idle until its first answer.
		s.drain(ctx)
		if s.relays {
			_ = s.listener.Answered(ctx) // drain does not count the calls of routes
		}
		s.awaitAnswers()
		// ttrpc's client fails a call whose answer it has read but not yet delivered if the
		// connection ends at that moment.
		within(s.listener.HungUp(), lingerLimit)
		closing, cancel := context.WithTimeout(context.Background(), answerLimit)
		defer cancel()
		err = s.ttrpc.Shutdown(closing)
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// drain refuses new calls, and waits for those in progress until ctx ends.
func (s *Server) drain(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		s.calls.Lock()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// HungUp returns a channel that is closed when the next connection ends. A host hangs up after its
// last answer.
func (s *Server) HungUp() <-chan struct{} { return s.listener.HungUp() }

// AwaitHangUp waits until the calls that have ended are answered, and until the host hangs up,
// which it does after its last answer. hungUp comes from HungUp and must be obtained before that
// answer. AwaitHangUp reports whether the host has hung up in time.
func (s *Server) AwaitHangUp(hungUp <-chan struct{}) bool {
	s.awaitAnswers()
	return within(hungUp, hangUpLimit)
}

// awaitAnswers waits until every call that has ended is answered on its connection.
func (s *Server) awaitAnswers() {
	ctx, cancel := context.WithTimeout(context.Background(), answerLimit)
	defer cancel()
	_ = s.listener.Answered(ctx) // an error means that the time is over
}

// within reports whether a channel is closed within limit.
func within(closed <-chan struct{}, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-closed:
		return true
	case <-timer.C:
		return false
	}
}
