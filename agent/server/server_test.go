package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// name is the service of all calls here.
const name = agentpb.HealthServiceName

func quiet() *logrus.Entry {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return logrus.NewEntry(log)
}

// routing returns a server that does not listen, with a single call.
func routing(call Call) (*Server, *routed) {
	s := &Server{Log: quiet(), Counts: new(metrics.Calls)}
	s.table = s.routes(Calls{name: {"Test": call}})
	return s, s.table[name]["Test"]
}

func asked() *ttrpcframe.Request {
	return &ttrpcframe.Request{Service: []byte(name), Method: []byte("Test")}
}

// fine is an Answer, and quickly is a Quick.
func fine(context.Context, func(any) error) (any, error) { return nil, nil }
func quickly(*ttrpcframe.Request) ([]byte, bool)         { return []byte("quick"), true }

func nothing(any) error { return nil }

func TestCallWaitsForTheGuestToBeReady(t *testing.T) {
	s, call := routing(Call{Answer: fine})
	ready := make(chan struct{})
	s.Ready = ready
	soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	<-soon.Done()
	for range 100 { // the error must name the deadline, even though the modules are not loaded yet
		if _, err := call.answer(soon, nothing); status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "had passed when it arrived") {
			t.Fatalf("call whose deadline had passed\nwant a DeadlineExceeded that says so\ngot  %v", err)
		}
	}
	waits, giveUp := context.WithCancel(t.Context())
	waited := make(chan error)
	go func() {
		_, err := call.answer(waits, nothing)
		waited <- err
	}()
	giveUp()
	if err := <-waited; status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("before\nwant DeadlineExceeded\ngot  %v", err)
	}
	answered := make(chan error)
	go func() {
		_, err := call.answer(t.Context(), nothing)
		answered <- err
	}()
	close(ready)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

// ended returns when all calls are refused, while one call goes on.
func (s *Server) ended(t *testing.T) (goesOn func()) {
	t.Helper()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	s.calls.RLock()
	s.drain(over)
	for s.calls.TryRLock() { // fails as soon as drain waits
		s.calls.RUnlock()
		runtime.Gosched()
	}
	return s.calls.RUnlock
}

func TestOnlyHealthIsAnsweredBeforeTheGuestIsReadyAndAtTheEnd(t *testing.T) {
	for _, always := range []bool{false, true} {
		s, call := routing(Call{Answer: fine, Quick: quickly, Always: always})
		answered := func() bool {
			over, cancel := context.WithCancel(t.Context())
			cancel()
			_, err := call.answer(over, nothing)
			response, ok := s.quick(asked())
			if ok != (err == nil) || ok != (string(response) == "quick") {
				t.Errorf("Answer and Quick differ: %v; %q, %v", err, response, ok)
			}
			return ok
		}
		ready := make(chan struct{})
		s.Ready = ready
		if got := answered(); got != always {
			t.Errorf("before\nwant answered: %v\ngot  %v", always, got)
		}
		close(ready)
		defer s.ended(t)()
		if got := answered(); got != always {
			t.Errorf("at the end\nwant answered: %v\ngot  %v", always, got)
		}
	}
}

func TestCallsAreRoutedByServiceAndMethod(t *testing.T) {
	s, _ := routing(Call{Answer: fine, Quick: quickly, Ordered: true})
	for _, r := range []*ttrpcframe.Request{
		{Service: []byte(name), Method: []byte("test")},
		{Service: []byte("Test"), Method: []byte(name)},
		{Service: []byte(name)},
		{Method: []byte("Test")},
		{},
	} {
		if _, ok := s.quick(r); ok || s.isOrdered(r) {
			t.Errorf("%s/%s is another call", r.Service, r.Method)
		}
	}
	if _, ok := s.quick(asked()); !ok || !s.isOrdered(asked()) {
		t.Error("the call itself is not routed")
	}
	if s, _ := routing(Call{Answer: fine}); s.isOrdered(asked()) {
		t.Error("a call without an order has one")
	}
}

// A route gets only calls that are not in the table.
func TestTableTakesPrecedenceOverRoutes(t *testing.T) {
	s, _ := routing(Call{Answer: fine})
	all := s.behind([]transport.Route{
		{Has: func(*ttrpcframe.Request) bool { return true }},
		{Has: func(r *ttrpcframe.Request) bool { return string(r.Method) == "Other" }},
	})
	for _, test := range []struct {
		method string
		want   [2]bool
	}{{"Test", [2]bool{}}, {"Other", [2]bool{true, true}}, {"Another", [2]bool{true, false}}} {
		r := &ttrpcframe.Request{Service: []byte(name), Method: []byte(test.method)}
		if got := [2]bool{all[0].Has(r), all[1].Has(r)}; got != test.want {
			t.Errorf("%s\nwant %v\ngot  %v", test.method, test.want, got)
		}
	}
}

// A call is counted once, whatever answers it, and is timed unless it takes almost no time.
func TestCallIsCountedWhereItIsAnswered(t *testing.T) {
	for _, test := range []struct {
		call          Call
		counts, times int
	}{
		{Call{Answer: fine, Quick: quickly}, 2, 1},
		{Call{Answer: fine, Quick: quickly, Timed: true}, 2, 2},
		{Call{Answer: fine, Quick: func(*ttrpcframe.Request) ([]byte, bool) { return nil, false }, Timed: true}, 1, 1},
		{Call{Answer: fine, Quick: func(*ttrpcframe.Request) ([]byte, bool) { panic("a bug") }}, 1, 1},
	} {
		s, call := routing(test.call)
		s.quick(asked())
		if _, err := call.answer(t.Context(), nothing); err != nil {
			t.Fatal(err)
		}
		var text metrics.Text
		s.Counts.Write(&text)
		for want, n := range map[string]int{
			`directvol_agent_calls_total{method="Test",code="OK"} %d`:       test.counts,
			`directvol_agent_call_duration_seconds_count{method="Test"} %d`: test.times,
		} {
			if want = fmt.Sprintf(want, n); !strings.Contains(text.String(), want) {
				t.Errorf("want %s\ngot  %s", want, text.String())
			}
		}
	}
}

func TestPanicEndsItsCallAlone(t *testing.T) {
	panics := func(context.Context, func(any) error) (any, error) { panic("a bug") }
	for _, always := range []bool{false, true} {
		s, call := routing(Call{Answer: panics, Quick: func(*ttrpcframe.Request) ([]byte, bool) { panic("a bug") }, Always: always})
		if _, ok := s.quick(asked()); ok {
			t.Error("a panic where the frame was read is an answer")
		}
		if _, err := call.answer(t.Context(), nothing); status.Code(err) != codes.Internal || strings.Contains(err.Error(), "goroutine") {
			t.Errorf("want an Internal without a stack\ngot  %v", err)
		}
		if !s.calls.TryLock() {
			t.Error("the call is still under way")
		}
	}
}

// serving returns a server on a unix socket, one of whose calls returns when release is closed.
func serving(t *testing.T) (s *Server, client *ttrpc.Client, began, release chan struct{}) {
	t.Helper()
	began, release = make(chan struct{}), make(chan struct{})
	s, client = listening(t, Calls{name: {
		"Check": {Quick: func(*ttrpcframe.Request) ([]byte, bool) { return nil, true }, Answer: fine, Always: true},
		"Version": {Answer: service.Method(func(context.Context, *agentpb.CheckRequest) (*agentpb.VersionCheckResponse, error) {
			close(began)
			<-release
			return &agentpb.VersionCheckResponse{}, nil
		})},
	}})
	return s, client, began, release
}

// listening returns a server on a unix socket, and a client of it.
func listening(t *testing.T, calls Calls, routes ...transport.Route) (*Server, *ttrpc.Client) {
	t.Helper()
	s := &Server{Log: quiet()}
	path := filepath.Join(t.TempDir(), "agent.sock")
	if err := s.Listen(address.Address{Scheme: address.Unix, Path: path}, calls, routes...); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		s.Close()
		if err := <-served; !errors.Is(err, ttrpc.ErrServerClosed) {
			t.Errorf("Serve\nwant %v\ngot  %v", ttrpc.ErrServerClosed, err)
		}
	})
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(conn)
	t.Cleanup(func() { client.Close() })
	return s, client
}

func call(t *testing.T, client *ttrpc.Client, method string) error {
	_, err := service.Call[agentpb.VersionCheckResponse](t.Context(), client, name, method, &agentpb.CheckRequest{})
	return err
}

// A call in flight is answered, a new call is refused, and Health answers until the end.
func TestShutdownWaitsForTheCallsUnderWay(t *testing.T) {
	s, client, began, release := serving(t)
	answered := make(chan error)
	go func() { answered <- call(t, client, "Version") }()
	<-began
	ended := make(chan error)
	go func() { ended <- s.Shutdown(t.Context()) }()
	for s.calls.TryRLock() { // fails as soon as Shutdown waits
		s.calls.RUnlock()
		runtime.Gosched()
	}
	select {
	case <-ended:
		t.Error("it did not wait")
	default:
	}
	if err := call(t, client, "Version"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "nothing was done") {
		t.Errorf("a call that comes then\nwant Unavailable\ngot  %v", err)
	}
	if err := call(t, client, "Check"); err != nil {
		t.Errorf("Health then: %v", err)
	}
	close(release)
	if err := <-answered; err != nil {
		t.Errorf("the call under way: %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Errorf("again: %v", err)
	}
	for call(t, client, "Check") == nil { // until ttrpc's server closes the connection, which it does later
	}
}

// A Shutdown treats the calls of a route like those of the table: one in flight is answered, a new
// one is refused and does not reach the route.
func TestShutdownWaitsForTheCallsOfRoutes(t *testing.T) {
	began, release := make(chan struct{}), make(chan struct{})
	s, client := listening(t, Calls{}, transport.Route{Has: func(*ttrpcframe.Request) bool { return true }, Serve: func(lane net.Conn) {
		defer lane.Close()
		for frame := make([]byte, 4096); ; {
			n, err := lane.Read(frame) // the only call that may come here is short, and arrives in one piece
			if err != nil {
				return
			}
			answer := ttrpcframe.AppendResponse(nil, ttrpcframe.ParseHeader(frame[:n]).StreamID, nil)
			began <- struct{}{}
			go func() {
				<-release
				_, _ = lane.Write(answer)
			}()
		}
	}})
	answered := make(chan error)
	go func() { answered <- call(t, client, "Version") }()
	<-began
	ended := make(chan error, 1)
	go func() { ended <- s.Shutdown(t.Context()) }()
	for s.calls.TryRLock() { // fails as soon as Shutdown waits
		s.calls.RUnlock()
		runtime.Gosched()
	}
	later, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	go func() {
		if _, ok := <-began; ok { // it reaches the route, where nobody answers it
			giveUp()
		}
	}()
	for range 2 {
		_, err := service.Call[agentpb.VersionCheckResponse](later, client, name, "Version", &agentpb.CheckRequest{Service: strings.Repeat("x", 100_000)})
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "nothing was done") {
			t.Errorf("a call that comes then\nwant Unavailable\ngot  %v", err)
		}
	}
	select {
	case err := <-ended:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(3 * answerLimit): // longer than all else that Shutdown waits for
	}
	close(release)
	if err := <-answered; err != nil {
		t.Errorf("the call in flight: %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	close(began)
}

// A call that is refused before it has joined must not block later calls.
func TestOrderedCallThatNeverJoinsDelaysNoOther(t *testing.T) {
	refused := service.Method(func(context.Context, *agentpb.CheckRequest) (*agentpb.VersionCheckResponse, error) {
		return nil, status.Error(codes.InvalidArgument, "refused")
	})
	s, client := listening(t, Calls{name: {"Version": {Answer: refused, Ordered: true}}})
	for range 3 {
		if err := call(t, client, "Version"); status.Code(err) != codes.InvalidArgument {
			t.Errorf("want InvalidArgument\ngot  %v", err)
		}
	}
	if !s.calls.TryLock() {
		t.Error("a call is still under way")
	}
	s.calls.Unlock()
}

func TestShutdownCutsACallThatTakesLonger(t *testing.T) {
	s, client, began, release := serving(t)
	defer close(release)
	answered := make(chan error)
	go func() { answered <- call(t, client, "Version") }()
	<-began
	over, cancel := context.WithCancel(t.Context())
	cancel()
	asked := time.Now()
	if err := s.Shutdown(over); err != nil {
		t.Error(err)
	}
	// Shutdown waits for the answer, and then for the client to hang up.
	if want, took := answerLimit+lingerLimit, time.Since(asked); took < want {
		t.Errorf("want the answer awaited for %v\ngot  %v", want, took)
	}
	s.Close()
	if err := <-answered; status.Code(err) != codes.Unavailable {
		t.Errorf("the call\nwant it cut\ngot  %v", err)
	}
}

func TestConnectionsStayOpenAfterTheLastAnswer(t *testing.T) {
	s, _ := listening(t, Calls{})
	conn, err := net.Dial("unix", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ended := make(chan time.Time)
	go func() {
		_, _ = io.Copy(io.Discard, conn)
		ended <- time.Now()
	}()
	asked := time.Now()
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if open := (<-ended).Sub(asked); open < lingerLimit {
		t.Errorf("want it open for %v\ngot  %v", lingerLimit, open)
	}
}

func TestAwaitHangUpWaitsForTheHost(t *testing.T) {
	s, client, began, release := serving(t)
	hungUp := s.HungUp()
	close(release)
	if err := call(t, client, "Version"); err != nil {
		t.Fatal(err)
	}
	<-began
	client.Close()
	if !s.AwaitHangUp(hungUp) {
		t.Error("want it noticed")
	}
	s, client, began, release = serving(t)
	defer close(release)
	go func() { _ = call(t, client, "Version") }()
	<-began
	gone := make(chan struct{}) // another connection has ended before
	close(gone)
	asked := time.Now()
	if s.AwaitHangUp(gone); time.Since(asked) < answerLimit {
		t.Errorf("a call that is not answered\nwant a wait of %v\ngot  %v", answerLimit, time.Since(asked))
	}
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if within(make(chan struct{}), hangUpLimit) || time.Since(began) != hangUpLimit {
			t.Errorf("a host that stays\nwant it given up after %v\ngot  %v", hangUpLimit, time.Since(began))
		}
	})
}

// BenchmarkQuick measures what routing adds to a call that is answered in place.
func BenchmarkQuick(b *testing.B) {
	s, _ := routing(Call{Answer: fine, Quick: quickly})
	ready := make(chan struct{})
	close(ready)
	s.Ready = ready
	r := asked()
	b.ReportAllocs()
	for b.Loop() {
		s.quick(r)
	}
}
