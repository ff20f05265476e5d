package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// other starts another program's server on a unix socket, and returns a route to it that copies
// bytes.
func other(t *testing.T) (route Route, opened *atomic.Int32) {
	t.Helper()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	server.RegisterService(agentpb.AgentServiceName, &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"CopyFile": service.Method(func(ctx context.Context, r *agentpb.CopyFileRequest) (*agentpb.Metrics, error) {
			kept, _ := ttrpc.GetMetadataValue(ctx, "kept")
			if _, limited := ctx.Deadline(); !limited {
				kept += ", and no time-out"
			}
			return &agentpb.Metrics{Metrics: kept + string(r.Data)}, nil
		}),
	}})
	path := filepath.Join(t.TempDir(), "other.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(context.Background(), l)
	t.Cleanup(func() { server.Close() })
	opened = new(atomic.Int32)
	return Route{
		Has: func(r *ttrpcframe.Request) bool { return string(r.Service) == agentpb.AgentServiceName },
		Serve: func(lane net.Conn) {
			opened.Add(1)
			defer lane.Close()
			there, err := net.Dial("unix", path)
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(there, lane)
				there.Close()
			}()
			_, _ = io.Copy(lane, there)
		},
	}, opened
}

// Calls of one connection that are answered by different servers do not disturb each other, and
// keep their payloads, time-outs, metadata and errors.
func TestEachRouteAnswersItsCallsOfOneConnection(t *testing.T) {
	route, opened := other(t)
	client := dial(t, serve(t, serving, route))
	ctx, cancel := context.WithTimeout(ttrpc.WithMetadata(t.Context(), ttrpc.MD{"kept": {"metadata"}}), limit)
	defer cancel()
	if _, err := service.Call[agentpb.VersionCheckResponse](ctx, client, agentpb.HealthServiceName, "Version", &agentpb.CheckRequest{}); err != nil {
		t.Error(err)
	}
	if opened.Load() != 0 {
		t.Error("a lane was opened without a call")
	}
	var all sync.WaitGroup
	for i := range 20 {
		data := bytes.Repeat([]byte{'a' + byte(i)}, 1+i*i*i*400) // in one read, in several reads, and in several pieces
		all.Go(func() {
			answer, err := service.Call[agentpb.Metrics](ctx, client, agentpb.AgentServiceName, "CopyFile", &agentpb.CopyFileRequest{Data: data})
			if err != nil || answer.Metrics != "metadata"+string(data) {
				t.Errorf("%d bytes to the other server: error %v", len(data), err)
			}
		})
		all.Go(func() {
			answer, err := service.Call[agentpb.VersionCheckResponse](ctx, client, agentpb.HealthServiceName, "Version", &agentpb.CheckRequest{Service: string(data)})
			if err != nil || answer.AgentVersion != string(data) {
				t.Errorf("%d bytes to the first server: error %v", len(data), err)
			}
		})
		all.Go(func() {
			if _, err := service.Call[agentpb.HealthCheckResponse](t.Context(), client, agentpb.HealthServiceName, "Check", &agentpb.CheckRequest{}); err != nil && status.Code(err) != codes.Aborted { // by the server, if the quick call took too long
				t.Errorf("where it was read: %v", err)
			}
		})
		all.Go(func() {
			if _, err := service.Call[agentpb.Metrics](ctx, client, agentpb.AgentServiceName, "Unknown", &agentpb.CheckRequest{}); status.Code(err) != codes.Unimplemented {
				t.Errorf("an unknown method\nwant Unimplemented\ngot  %v", err)
			}
		})
	}
	all.Wait()
	if got := opened.Load(); got != 1 {
		t.Errorf("lanes\nwant 1\ngot  %d", got)
	}
}

// A frame may arrive in pieces of any length.
func TestFrameIsRoutedWhereverItIsCut(t *testing.T) {
	end, peer := socketPair(t)
	defer unix.Close(peer)
	c := ordered(t, end, nil)
	defer c.Close()
	opened := make(chan net.Conn, 1)
	c.room.routes = []Route{{
		Has:   func(r *ttrpcframe.Request) bool { return string(r.Method) == "CopyFile" },
		Serve: func(lane net.Conn) { opened <- lane },
	}}
	whole := requestFrame(t, "CopyFile", 10)
	for cut := ttrpcframe.HeaderBytes; cut <= len(whole); cut++ {
		if c.laneOf([][]byte{whole[:cut], whole[cut:]}) == c {
			t.Errorf("cut behind %d bytes: want the route's lane", cut)
		}
	}
	if to := c.laneOf([][]byte{requestFrame(t, "CopyFiles", 10)}); to != c {
		t.Error("another call goes to the route")
	}
	(<-opened).Close()
}

// If any server closes its lane, the connection ends and releases everything.
func TestLaneThatIsClosedEndsItsConnection(t *testing.T) {
	for _, test := range []struct{ name, method string }{{"the route's", "CopyFile"}, {"the peer's own end", ""}} {
		lanes := make(chan net.Conn, 1)
		path := serve(t, serving, Route{
			Has:   func(r *ttrpcframe.Request) bool { return string(r.Service) == agentpb.AgentServiceName },
			Serve: func(lane net.Conn) { lanes <- lane },
		})
		client := dial(t, path)
		called := make(chan error, 1)
		go func() {
			_, err := service.Call[agentpb.Metrics](t.Context(), client, agentpb.AgentServiceName, "CopyFile", &agentpb.CopyFileRequest{})
			called <- err
		}()
		lane := (<-lanes).(*lane)
		if test.method == "" {
			client.Close()
		} else {
			lane.Close()
		}
		if err := <-called; err == nil {
			t.Errorf("%s: the call\nwant it cut\ngot  an answer", test.name)
		}
		if _, err := io.Copy(io.Discard, lane); err != nil {
			t.Errorf("%s: want the lane's end\ngot  %v", test.name, err)
		}
		lane.Close()
		for r := lane.room; ; { // until the last user of the connection is done
			r.mu.Lock()
			left := len(r.conns)
			r.mu.Unlock()
			if left == 0 {
				break
			}
		}
		if lane.users.Load() != 0 {
			t.Errorf("%s: %d still use the connection", test.name, lane.users.Load())
		}
	}
}

// A connection with an unread answer keeps its place only for a while, whichever lane the answer is
// in.
func TestAnyStuckLaneGivesWay(t *testing.T) {
	l := lanes{others: map[int]*lane{0: {}}}
	l.others[0].writing.start()
	if l.stuck() {
		t.Error("want it to have its time")
	}
	l.others[0].writing.began.Add(-int64(2 * patience))
	if !l.stuck() {
		t.Error("want it seen")
	}
}

// A server that writes a header with a length beyond the limit would make the agent keep all that
// follows.
func TestAnswerThatIsTooLongEndsItsConnection(t *testing.T) {
	c, peer := mustJoin(t, small())
	sendCall(t, c, peer, 1)
	whole := ttrpcframe.AppendResponse(nil, 1, make([]byte, 10))
	if n, err := c.Write(whole[:ttrpcframe.HeaderBytes-1]); err != nil || n != ttrpcframe.HeaderBytes-1 {
		t.Errorf("a header that is cut: %d, error %v", n, err)
	}
	if n, err := c.Write(whole[ttrpcframe.HeaderBytes-1:]); err != nil {
		t.Errorf("the rest: %d, error %v", n, err)
	}
	long := ttrpcframe.Header{Length: ttrpcframe.MaxLength + 1, StreamID: 1, Type: ttrpcframe.TypeResponse}
	if _, err := c.Write(long.Append(nil)); err == nil || cap(c.begun) > 0 {
		t.Fatalf("want it refused, and nothing kept\ngot  error %v, %d bytes", err, cap(c.begun))
	}
	isEnded(t, c, peer)
}

// The number of a closed connection's descriptor may be another file's. A server that still writes
// then gets an error, and the other file gets nothing.
func TestWriteAfterTheEndReachesNoOtherConnection(t *testing.T) {
	c, peer, release, closed := hungPair(t)
	close(release)
	unix.Close(peer)
	c.Close()
	<-closed
	mine, other := socketPair(t)
	defer unix.Close(mine)
	defer unix.Close(other)
	again, err := unix.FcntlInt(uintptr(mine), unix.F_DUPFD_CLOEXEC, c.fd)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(again)
	if mine != c.fd && other != c.fd && again != c.fd {
		t.Skip("another goroutine has opened a file with that number: run it again")
	}
	if _, err := c.Write(ttrpcframe.AppendResponse(nil, 1, nil)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("want %v\ngot  %v", net.ErrClosed, err)
	}
	for _, fd := range []int{mine, other} {
		if n, _, err := unix.Recvfrom(fd, make([]byte, 100), unix.MSG_DONTWAIT); err != unix.EAGAIN {
			t.Errorf("%d bytes of it are there, error %v", n, err)
		}
	}
}
