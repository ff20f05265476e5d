package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// ttrpc closes a connection on which it has not answered yet, even if an answer is being written.
// After Answered, every answer has arrived.
func TestServerThatShutsDownWhenAllIsAnsweredCutsNoAnswer(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	for range 100 {
		path := filepath.Join(t.TempDir(), "agent.sock")
		l, err := Listen(address.Address{Scheme: address.Unix, Path: path}, serving, nil, logrus.NewEntry(log))
		if err != nil {
			t.Fatal(err)
		}
		server, err := ttrpc.NewServer()
		if err != nil {
			t.Fatal(err)
		}
		asked, answer := make(chan struct{}), make(chan struct{})
		server.RegisterService(agentpb.HealthServiceName, &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
			"Version": service.Method(func(_ context.Context, r *agentpb.CheckRequest) (*agentpb.VersionCheckResponse, error) {
				close(asked)
				<-answer
				return &agentpb.VersionCheckResponse{AgentVersion: r.Service}, nil
			}),
		}})
		go server.Serve(context.Background(), l)
		conn := ask(t, path)
		<-asked
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if err := l.Answered(over); !errors.Is(err, context.Canceled) {
			t.Fatalf("before the answer\nwant it awaited\ngot  %v", err)
		}
		close(answer)
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		if err := errors.Join(l.Answered(ctx), server.Shutdown(ctx)); err != nil {
			t.Fatal(err)
		}
		cancel()
		if answer, err := io.ReadAll(conn); err != nil || len(answer) < ttrpcframe.HeaderBytes || ttrpcframe.ParseHeader(answer).Type != ttrpcframe.TypeResponse {
			t.Fatalf("want the answer\ngot  %q, error %v", answer, err)
		}
	}
}

// ask connects and calls Version. It is not a ttrpc client, because such a client drops an answer
// that it has read if the connection ends at once.
func ask(t *testing.T, path string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	request, err := proto.Marshal(&ttrpc.Request{Service: agentpb.HealthServiceName, Method: "Version"})
	if err != nil {
		t.Fatal(err)
	}
	header := ttrpcframe.Header{Length: uint32(len(request)), StreamID: 1, Type: ttrpcframe.TypeRequest}
	if _, err := conn.Write(append(header.Append(nil), request...)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestEndedConnectionHasNoPendingAnswers(t *testing.T) {
	var o pending
	a, b := &conn{}, &conn{}
	o.answered(a) // without a request
	o.took(a)
	o.took(a)
	o.took(b)
	waits := make(chan error)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { waits <- o.await(ctx) }()
	for awaited := false; !awaited; runtime.Gosched() {
		o.mu.Lock()
		awaited = o.none != nil
		o.mu.Unlock()
	}
	o.answered(b)
	o.answered(b)
	o.left(a)
	if err := <-waits; err != nil || o.requests != 0 {
		t.Errorf("want nothing pending\ngot  %d, %v", o.requests, err)
	}
}

// While a call is answered in place, or passes from there to the server, the agent does not end and
// the connection keeps its place.
func TestQuickCallHasAPendingAnswer(t *testing.T) {
	c, peer, release, closed := hungPair(t)
	if _, err := unix.Write(peer, asked(1)); err != nil {
		t.Fatal(err)
	}
	for c.sequence.Load() == 0 { // until quick is called
		runtime.Gosched()
	}
	pendingIs := func(when string, want int) {
		t.Helper()
		c.room.pending.mu.Lock()
		defer c.room.pending.mu.Unlock()
		if c.pending != want || c.room.pending.requests != want {
			t.Errorf("%s\nwant %d pending\ngot  %d, %d in all", when, want, c.pending, c.room.pending.requests)
		}
	}
	if !c.room.pending.has(c.conn) {
		t.Error("nothing is pending while it is answered where it was read")
	}
	if _, err := io.ReadFull(c, make([]byte, ttrpcframe.HeaderBytes)); err != nil {
		t.Fatal(err)
	}
	pendingIs("when it has gone up", 1)
	if _, err := c.Write(ttrpcframe.AppendResponse(nil, 1, nil)); err != nil {
		t.Fatal(err)
	}
	pendingIs("when the server has answered", 0)
	close(release)
	unix.Close(peer)
	if _, err := io.ReadAll(c); err != nil {
		t.Fatal(err)
	}
	pendingIs("when it has declined", 0)
	c.Close()
	<-closed
}
