package agentclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/protocols/volumepb"
)

// everyMethod returns an agent that answers all calls of a Client.
func everyMethod() *agent {
	empty := &emptypb.Empty{}
	return &agent{answers: map[string]any{
		"Check":   &agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_SERVING},
		"Version": &agentpb.VersionCheckResponse{AgentVersion: strings.Repeat("v", 1000)}, "GetGuestDetails": &agentpb.GuestDetailsResponse{},
		"GetVolumeStats": &agentpb.VolumeStatsResponse{}, "ResizeVolume": empty, "CheckResizeVolume": empty, "CheckReleased": empty, "GetVolumeHealth": &volumepb.GetVolumeHealthResponse{},
		"ListVolumes": &volumepb.ListVolumesResponse{}, "GetVolume": &volumepb.Volume{VolumeGuestPath: "/v"},
		"CreateSandbox": empty, "DestroySandbox": empty, "CreateContainer": empty, "RemoveContainer": empty,
	}}
}

// calls makes one call of each method. repeatable marks the calls that the client repeats.
var calls = map[string]struct {
	repeatable bool
	make       func(*Client, context.Context) error
}{
	"Check":             {true, (*Client).Check},
	"Version":           {true, func(c *Client, ctx context.Context) error { _, err := c.Version(ctx); return err }},
	"GetGuestDetails":   {true, func(c *Client, ctx context.Context) error { _, err := c.GetGuestDetails(ctx); return err }},
	"GetVolumeStats":    {true, func(c *Client, ctx context.Context) error { _, err := c.GetVolumeStats(ctx, "/v"); return err }},
	"GetVolumeHealth":   {true, func(c *Client, ctx context.Context) error { _, err := c.GetVolumeHealth(ctx, "/v"); return err }},
	"CheckResizeVolume": {true, func(c *Client, ctx context.Context) error { return c.CheckResizeVolume(ctx, "/v", 1) }},
	"CheckReleased":     {true, func(c *Client, ctx context.Context) error { return c.CheckReleased(ctx, "blk", "02/01", "c1") }},
	"ResizeVolume":      {true, func(c *Client, ctx context.Context) error { return c.ResizeVolume(ctx, "/v", 1) }},
	"ListVolumes":       {true, func(c *Client, ctx context.Context) error { _, err := c.ListVolumes(ctx); return err }},
	"GetVolume":         {true, func(c *Client, ctx context.Context) error { _, err := c.GetVolume(ctx, "/v"); return err }},
	"CreateSandbox": {false, func(c *Client, ctx context.Context) error {
		return c.CreateSandbox(ctx, &agentpb.CreateSandboxRequest{})
	}},
	"DestroySandbox": {false, (*Client).DestroySandbox},
	"CreateContainer": {false, func(c *Client, ctx context.Context) error {
		return c.CreateContainer(ctx, &agentpb.CreateContainerRequest{})
	}},
	"RemoveContainer": {false, func(c *Client, ctx context.Context) error { return c.RemoveContainer(ctx, "c") }},
}

// cut describes where a connection breaks on which a client has sent one whole request.
type cut struct {
	request int // bytes of the request that the agent gets; -1 for all
	answer  int // bytes of the answer that the client gets; -1 for all but the last
}

var cuts = map[string]cut{
	"before the request":        {request: 0},
	"inside the request's head": {request: 5},
	"inside the request":        {request: ttrpcframe.HeaderBytes + 7},
	"before the answer":         {request: -1},
	"inside the answer's head":  {request: -1, answer: 3},
	"before the answer's end":   {request: -1, answer: -1},
}

// breaker forwards connections to an agent, and breaks the first ones.
type breaker struct {
	t      *testing.T
	agent  net.Listener
	cuts   []cut // of the coming connections, in order
	mu     sync.Mutex
	dialed int
	open   []net.Conn
}

// between puts a breaker in front of an agent's listener, and returns it with its own listener.
func between(t *testing.T, agent net.Listener, cuts ...cut) (*breaker, net.Listener) {
	t.Helper()
	b, front := &breaker{t: t, agent: agent, cuts: cuts}, listen(t)
	go func() {
		for {
			conn, err := front.Accept()
			if err != nil {
				return
			}
			go b.pass(conn)
		}
	}()
	return b, front
}

// breakAll breaks all present connections.
func (b *breaker) breakAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, conn := range b.open {
		conn.Close()
	}
}

func (b *breaker) connections() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dialed
}

func (b *breaker) pass(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("unix", b.agent.Addr().String())
	if err != nil {
		b.t.Error(err)
		return
	}
	defer server.Close()
	b.mu.Lock()
	turn := b.dialed
	b.dialed++
	b.open = append(b.open, client)
	b.mu.Unlock()
	if turn >= len(b.cuts) {
		go io.Copy(server, client)
		io.Copy(client, server)
		return
	}
	b.passUpTo(b.cuts[turn], client, server)
}

// passUpTo forwards one call up to the cut. The cut happens when the agent has handled what it
// received.
func (b *breaker) passUpTo(c cut, client, server net.Conn) {
	request := readFrame(client)
	if c.request >= 0 {
		server.Write(request[:c.request])
		server.(*net.UnixConn).CloseWrite()
		io.Copy(io.Discard, server)
		return
	}
	server.Write(request)
	answer := readFrame(server)
	if c.answer < 0 {
		c.answer = len(answer) - 1
	}
	client.Write(answer[:c.answer])
}

// readFrame returns a whole frame with its header; nil at the end of the connection.
func readFrame(conn net.Conn) []byte {
	b := make([]byte, ttrpcframe.HeaderBytes)
	if _, err := io.ReadFull(conn, b); err != nil {
		return nil
	}
	b = append(b, make([]byte, ttrpcframe.ParseHeader(b).Length)...)
	if _, err := io.ReadFull(conn, b[ttrpcframe.HeaderBytes:]); err != nil {
		return nil
	}
	return b
}

func TestBrokenCallIsRepeatedIfThatIsSafe(t *testing.T) {
	for method, call := range calls {
		for where, c := range cuts {
			t.Run(method+" "+where, func(t *testing.T) {
				t.Parallel()
				a := everyMethod()
				b, front := between(t, serve(t, a), c, c)
				err := call.make(dial(t, front, Config{Timeout: time.Hour}), t.Context())
				wantConnections, wantRuns := 1, 0
				if call.repeatable {
					wantConnections, wantRuns = 3, 1
				}
				if c.request < 0 {
					wantRuns = wantConnections
				}
				if errors.Is(err, ErrOutcomeUnknown) == call.repeatable || status.Code(err) == codes.Unavailable == call.repeatable || err == nil != call.repeatable {
					t.Errorf("want %v unless it may be made again\ngot  %v", ErrOutcomeUnknown, err)
				}
				if got := len(a.requests); got != wantRuns {
					t.Errorf("times that the agent ran it\nwant %d\ngot  %d", wantRuns, got)
				}
				if got := b.connections(); got != wantConnections {
					t.Errorf("connections\nwant %d\ngot  %d", wantConnections, got)
				}
			})
		}
	}
}

func TestCallsThatAreUnderWayWhenTheConnectionBreaksAllComeBack(t *testing.T) {
	release := make(chan struct{})
	a := everyMethod()
	a.before = func(string) { <-release }
	b, front := between(t, serve(t, a))
	c := dial(t, front, Config{Timeout: time.Hour})
	results := make(chan error, 40)
	for i := range cap(results) {
		go func() {
			_, err := c.GetVolumeStats(t.Context(), fmt.Sprint("/v", i))
			results <- err
		}()
	}
	for range cap(results) {
		<-a.requests // the agent has received all of them
	}
	b.breakAll()
	close(release)
	for range cap(results) {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if got := b.connections(); got != 2 {
		t.Errorf("connections\nwant 2\ngot  %d", got)
	}
}

func TestAgentThatComesUpLateIsWaitedFor(t *testing.T) {
	path := t.TempDir() + "/s"
	c := New(address.Address{Scheme: address.Unix, Path: path}, Config{Timeout: time.Hour})
	defer c.Close()
	result := make(chan error, 1)
	go func() { result <- c.CreateSandbox(t.Context(), &agentpb.CreateSandboxRequest{}) }()
	select {
	case err := <-result:
		t.Fatalf("want it to wait\ngot  %v", err)
	case <-time.After(3 * firstPause):
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	serveOn(t, everyMethod(), listener)
	if err := <-result; err != nil {
		t.Error(err)
	}
}

func TestAgentThatRestartsBetweenCallsIsFoundAgain(t *testing.T) {
	path := t.TempDir() + "/s"
	c := New(address.Address{Scheme: address.Unix, Path: path}, Config{Timeout: time.Hour})
	defer c.Close()
	for i := range 5 {
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		stop := serveOn(t, everyMethod(), listener)
		// Nothing was sent to the lost agent, so even this call can be repeated without risk.
		if err := c.CreateSandbox(t.Context(), &agentpb.CreateSandboxRequest{}); err != nil {
			t.Errorf("agent %d: %v", i, err)
		}
		stop()
		c.link.client.UserOnCloseWait(t.Context())
	}
}

func TestUnreachableAgentIsNamedAtTheDeadline(t *testing.T) {
	c := New(address.Address{Scheme: address.Unix, Path: t.TempDir() + "/s"}, Config{})
	defer c.Close()
	for method, call := range calls {
		var err error
		for limit := 20 * time.Millisecond; limit < time.Minute; limit *= 2 { // grows until one attempt fits into the limit
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			err = call.make(c, ctx)
			cancel()
			if err != nil && strings.Contains(err.Error(), "no such file") {
				break
			}
		}
		if status.Code(err) != codes.DeadlineExceeded || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no such file") || errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("%s\nwant %v and why it could not be sent\ngot  %v", method, codes.DeadlineExceeded, err)
		}
	}
}

func TestCallGivenUpBeforeItsAnswerLeavesTheOutcomeUnknown(t *testing.T) {
	a := everyMethod()
	a.before = func(string) { <-t.Context().Done() }
	c := dial(t, serve(t, a), Config{})
	for method, call := range calls {
		ctx, giveUp := context.WithCancel(t.Context())
		go func() {
			<-a.requests
			giveUp()
		}()
		err := call.make(c, ctx)
		if status.Code(err) != codes.Canceled || errors.Is(err, ErrOutcomeUnknown) == call.repeatable {
			t.Errorf("%s\nwant %v, the outcome unknown: %v\ngot  %v", method, codes.Canceled, !call.repeatable, err)
		}
	}
}

func TestAgentsOwnUnavailableIsItsAnswer(t *testing.T) {
	a := everyMethod()
	for name := range a.answers {
		a.answers[name] = status.Error(codes.Unavailable, "not today")
	}
	c := dial(t, serve(t, a), Config{Timeout: time.Hour})
	for method, call := range calls {
		if err := call.make(c, t.Context()); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "not today") || errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("%s\nwant %v, not today\ngot  %v", method, codes.Unavailable, err)
		}
	}
	if got, want := len(a.requests), len(calls); got != want {
		t.Errorf("times that the agent was asked\nwant %d\ngot  %d", want, got)
	}
}

func TestCloseEndsCallsThatWait(t *testing.T) {
	a := everyMethod()
	a.before = func(string) { <-t.Context().Done() }
	there := dial(t, serve(t, a), Config{Timeout: time.Hour})
	nowhere := New(address.Address{Scheme: address.Unix, Path: t.TempDir() + "/s"}, Config{Timeout: time.Hour})
	for name, c := range map[string]*Client{"under way": there, "not connected": nowhere} {
		result := make(chan error, 1)
		go func() { result <- c.Check(context.Background()) }()
		if c == there {
			<-a.requests
		}
		c.Close()
		c.Close()
		if c == there {
			c.link.client.UserOnCloseWait(t.Context()) // the connection has ended too
		}
		for _, err := range []error{<-result, c.Check(context.Background())} {
			if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "closed") {
				t.Errorf("%s\nwant %v and that it was closed\ngot  %v", name, codes.Unavailable, err)
			}
		}
	}
}

func TestClosedClientConnectsNoMore(t *testing.T) {
	b, front := between(t, serve(t, everyMethod()))
	c := dial(t, front, Config{})
	if err := c.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Close()
	before := b.connections()
	for range 300 {
		if err := c.Check(t.Context()); status.Code(err) != codes.Unavailable {
			t.Errorf("want %v\ngot  %v", codes.Unavailable, err)
		}
	}
	if got := b.connections(); got != before {
		t.Errorf("connections\nwant %d\ngot  %d", before, got)
	}
}

// fakeVsock is a vsock that ends when the test closes done.
type fakeVsock struct{ done chan struct{} }

var errBackendDied = errors.New("the backend has ended: signal: killed")

func (v fakeVsock) VsockDone() <-chan struct{} { return v.done }
func (v fakeVsock) VsockErr() error            { return errBackendDied }

func TestEveryCallNamesALostVsock(t *testing.T) {
	for method, call := range calls {
		for _, state := range []string{"under way", "not connected", "afterwards"} {
			t.Run(method+" "+state, func(t *testing.T) {
				t.Parallel()
				a, vsock := everyMethod(), fakeVsock{make(chan struct{})}
				a.before = func(string) { <-t.Context().Done() }
				agent := serve(t, a)
				b, front := between(t, agent)
				c := New(address.Address{Scheme: address.Unix, Path: front.Addr().String()}, Config{Timeout: time.Hour, Vsock: vsock})
				defer c.Close()
				result := make(chan error, 1)
				wantUnknown := state == "under way" && !call.repeatable
				switch state {
				case "under way":
					go func() { result <- call.make(c, context.Background()) }()
					<-a.requests
					b.breakAll()
				case "not connected":
					front.Close()
					go func() { result <- call.make(c, context.Background()) }()
				}
				front.Close()
				if state == "under way" {
					c.link.client.UserOnCloseWait(t.Context())
					select {
					case err := <-result:
						t.Fatalf("want it to wait for the reason\ngot  %v", err)
					case <-time.After(2 * firstPause):
					}
				}
				close(vsock.done) // the reason is known a moment after the connection broke
				if state == "afterwards" {
					<-c.life.Done()
					result <- call.make(c, context.Background())
				}
				err := <-result
				if status.Code(err) != codes.Unavailable || !errors.Is(err, errBackendDied) || !strings.Contains(err.Error(), errBackendDied.Error()) {
					t.Errorf("want %v and %v\ngot  %v", codes.Unavailable, errBackendDied, err)
				}
				if errors.Is(err, ErrOutcomeUnknown) != wantUnknown {
					t.Errorf("outcome unknown\nwant %v\ngot  %v", wantUnknown, err)
				}
			})
		}
	}
}
