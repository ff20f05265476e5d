// Package server is how the host's calls are answered: it listens, routes each call by its service
// and method, and ends what is in flight when the agent does.
//
// It stands on agent/transport, which stays a package of its own: transport has sockets, frames,
// and what connections may take of the guest's memory; it knows no method's name, and the log's
// readers and the debug console listen by it too, without any call. Here is what becomes of a call,
// by the table that a route (agent/rpc) gives:
//
//	its frame is here     Quick answers it in the goroutine that has read it, or declines it
//	declined              ttrpc's server gives it a goroutine. It waits until the guest is ready, and where it
//	                      is Ordered until the calls before it have joined (agent/arrival). Answer answers it
//	not in the table      it goes, frame by frame, to the first Route that has it; else ttrpc's server answers
//	                      UNIMPLEMENTED. (A relay to another agent is such a route.)
//	it panics             it is answered INTERNAL, and nothing else happens: the agent may be PID 1
//
// Shutdown, beside a call:
//
//	in flight             is answered, or cut where its time is longer than Shutdown's
//	comes meanwhile       is refused with UNAVAILABLE: nothing was done. Health's calls are answered
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
	// answerLimit is how long the last answers have to leave before the end.
	answerLimit = time.Second
	// lingerLimit is how long the connections stay open behind the last answers.
	lingerLimit = 200 * time.Millisecond
	// hangUpLimit is how long the host has to hang up when it has the last answer.
	hangUpLimit = 5 * time.Second
)

// Server answers calls. All exported fields may be set before Listen.
type Server struct {
	Log    *logrus.Entry   // must be set
	Ready  <-chan struct{} // closed when the guest is ready, which calls wait for; nil where it is
	Counts *metrics.Calls  // where answered calls are counted; nil: nowhere that is read

	table    table
	order    arrival.Order // of calls, as the transport reads them
	listener *transport.Listener
	ttrpc    *ttrpc.Server
	calls    sync.RWMutex // each call under way holds it for reading
	ending   sync.Once
}

// Listen begins to listen at an address. Calls wait in their connections until Serve. Those that
// are not among calls go to routes. The caller ends the server by Shutdown, or by Close.
func (s *Server) Listen(at address.Address, calls Calls, routes ...transport.Route) error {
	if s.Counts == nil {
		s.Counts = new(metrics.Calls)
	}
	s.table = s.routes(calls)
	s.order.Of = s.isOrdered
	var err error
	if s.ttrpc, err = ttrpc.NewServer(); err != nil {
		return err
	}
	for name, methods := range s.table {
		s.ttrpc.RegisterService(name, &ttrpc.ServiceDesc{Methods: methods.answers()})
	}
	s.listener, err = transport.Listen(at, s.quick, &s.order, s.Log, s.behind(routes)...)
	return err
}

// Serve answers calls until the server is closed or cannot go on. Calls in flight do not end with
// anything but Shutdown.
func (s *Server) Serve() error { return s.ttrpc.Serve(context.Background(), s.listener) }

// Addr is the address that is listened on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Close ends the server at once, and cuts the calls in flight.
func (s *Server) Close() error { return errors.Join(s.ttrpc.Close(), s.listener.Close()) }

// Shutdown refuses calls from now on, lets those in flight be answered until ctx ends, and closes
// the connections: where answers are not read, about 2 s after that. It returns nil where calls
// were cut.
func (s *Server) Shutdown(ctx context.Context) (err error) {
	s.ending.Do(func() {
		// First, because ttrpc takes a connection for idle until its first answer.
		s.drain(ctx)
		s.awaitAnswers()
		// ttrpc's client takes its connection's end for that of a call whose answer it has read and
		// not delivered.
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

// drain refuses calls from now on, and waits for those under way until ctx ends.
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

// HungUp returns a channel that is closed when the next connection ends: whoever has its last
// answer hangs up.
func (s *Server) HungUp() <-chan struct{} { return s.listener.HungUp() }

// AwaitHangUp waits until the calls that have ended are answered, and until the host hangs up,
// which it does when it has its last answer. hungUp comes from HungUp, before that answer. It
// reports whether the host has hung up in time.
func (s *Server) AwaitHangUp(hungUp <-chan struct{}) bool {
	s.awaitAnswers()
	return within(hungUp, hangUpLimit)
}

// awaitAnswers waits until every call that has ended is answered on its connection.
func (s *Server) awaitAnswers() {
	ctx, cancel := context.WithTimeout(context.Background(), answerLimit)
	defer cancel()
	_ = s.listener.Answered(ctx) // in time, or not at all
}

// within reports whether a channel is closed before limit is over.
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
