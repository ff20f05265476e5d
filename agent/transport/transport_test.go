package transport

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// limit ends a test that hangs; no test measures it.
const limit = time.Minute

// serve serves Health on a unix socket: quick answers Check in place, and ttrpc's server answers
// Version with the caller's service. Other calls go to routes.
func serve(t *testing.T, quick Quick, routes ...Route) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.sock")
	log := logrus.New()
	log.SetOutput(io.Discard)
	l, err := Listen(address.Address{Scheme: address.Unix, Path: path}, quick, nil, logrus.NewEntry(log), routes...)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	server.RegisterService(agentpb.HealthServiceName, &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"Check": service.Method(func(context.Context, *agentpb.CheckRequest) (*agentpb.HealthCheckResponse, error) {
			return nil, status.Error(codes.Aborted, "by the server")
		}),
		"Version": service.Method(func(_ context.Context, r *agentpb.CheckRequest) (*agentpb.VersionCheckResponse, error) {
			return &agentpb.VersionCheckResponse{AgentVersion: r.Service}, nil
		}),
	}})
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(context.Background(), l) }()
	t.Cleanup(func() {
		server.Close()
		l.Close()
		<-ended
	})
	return path
}

// serving answers Check with SERVING, in place.
func serving(r *ttrpcframe.Request) ([]byte, bool) {
	if string(r.Method) != "Check" {
		return nil, false
	}
	b, err := (&agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_SERVING}).Marshal()
	return b, err == nil
}

func dial(t *testing.T, path string) *ttrpc.Client {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(conn)
	t.Cleanup(func() { client.Close() })
	return client
}

func check(ctx context.Context, c *ttrpc.Client) error {
	r, err := service.Call[agentpb.HealthCheckResponse](ctx, c, agentpb.HealthServiceName, "Check", &agentpb.CheckRequest{})
	if err == nil && r.Status != agentpb.HealthCheckResponse_SERVING {
		return errors.New("not serving")
	}
	return err
}

// inPlace calls Check until Quick has answered. On a slow machine the watch takes some calls from
// Quick (see takeOver), and the server refuses these.
func inPlace(ctx context.Context, c *ttrpc.Client) error {
	for {
		err := check(ctx, c)
		if code := status.Code(err); code != codes.Aborted && code != codes.Unimplemented {
			return err
		}
	}
}

func version(ctx context.Context, c *ttrpc.Client, text string) error {
	r, err := service.Call[agentpb.VersionCheckResponse](ctx, c, agentpb.HealthServiceName, "Version", &agentpb.CheckRequest{Service: text})
	if err == nil && r.AgentVersion != text {
		return errors.New("another text came back")
	}
	return err
}

func TestQuickCallsAndOthersShareConnections(t *testing.T) {
	path := serve(t, serving)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var wait sync.WaitGroup
	for range 20 {
		client := dial(t, path)
		for i := range 4 {
			wait.Go(func() {
				for range 50 {
					err := inPlace(ctx, client)
					if i%2 == 0 { // frames of one read, of several, and of megabytes
						err = version(ctx, client, strings.Repeat("x", []int{0, 500, 5000, 1 << 20}[i]+i))
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	wait.Wait()
}

func TestCallThatQuickDeclinesReachesTheServerUnchanged(t *testing.T) {
	path := serve(t, func(*ttrpcframe.Request) ([]byte, bool) { return nil, false })
	client := dial(t, path)
	if err := check(t.Context(), client); status.Code(err) != codes.Aborted {
		t.Errorf("want the server's own answer\ngot  %v", err)
	}
	if err := version(t.Context(), client, "v"); err != nil {
		t.Error(err)
	}
}

func TestCallsWithMetadataOrShortTimeoutsReachTheServer(t *testing.T) {
	path := serve(t, serving)
	client := dial(t, path)
	ctx := ttrpc.WithMetadata(t.Context(), ttrpc.MD{"k": {"v"}})
	if err := check(ctx, client); status.Code(err) != codes.Aborted {
		t.Errorf("with metadata: want the server's own answer\ngot  %v", err)
	}
}

// A hanging call must not block the other calls of its connection. The server answers it, exactly
// once.
func TestHungQuickCallDoesNotHangItsConnection(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	path := serve(t, func(r *ttrpcframe.Request) ([]byte, bool) {
		if len(r.Payload) > 0 {
			before := bytes.Clone(r.Payload)
			close(entered)
			<-release
			if !bytes.Equal(before, r.Payload) {
				t.Error("the request's buffer was written to while it was used")
			}
		}
		return serving(r)
	})
	client := dial(t, path)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	hung := make(chan error, 1)
	go func() {
		_, err := service.Call[agentpb.HealthCheckResponse](ctx, client, agentpb.HealthServiceName, "Check", &agentpb.CheckRequest{Service: "slow"})
		hung <- err
	}()
	<-entered
	for range 10 {
		if err := inPlace(ctx, client); err != nil {
			t.Fatal(err)
		}
		if err := version(ctx, client, strings.Repeat("y", 3000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-hung; status.Code(err) != codes.Aborted {
		t.Errorf("the call that hung\nwant the server's own answer\ngot  %v", err)
	}
	close(release)
	if err := inPlace(ctx, client); err != nil {
		t.Errorf("after it has answered in place too: %v", err)
	}
}

func TestGarbageEndsItsConnectionAlone(t *testing.T) {
	path := serve(t, serving)
	client := dial(t, path)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for name, raw := range map[string][]byte{
		"half a header":   {0, 0},
		"half a frame":    ttrpcframe.Header{Length: 100, StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil),
		"an oversize one": append(ttrpcframe.Header{Length: 1 << 31, StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil), make([]byte, 1<<16)...),
		"no request":      append(ttrpcframe.Header{Length: 3, StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil), 0xff, 0xff, 0xff),
		"zeros":           make([]byte, 1<<16),
	} {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		go conn.Write(raw)
		if err := inPlace(ctx, client); err != nil {
			t.Errorf("%s: beside it: %v", name, err)
		}
		conn.Close()
	}
}

func TestUnixSocketIsForRootAndReplacedWhenStale(t *testing.T) {
	path := serve(t, serving)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode\nwant 0600\ngot  %v, %v", info.Mode(), err)
	}
	to := address.Address{Scheme: address.Unix, Path: path}
	if l, err := Listen(to, serving, nil, logrus.NewEntry(logrus.New())); err == nil {
		l.Close()
		t.Error("a socket that is in use was taken over")
	}
	stale := filepath.Join(t.TempDir(), "stale.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: stale}); err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	l, err := Listen(address.Address{Scheme: address.Unix, Path: stale}, serving, nil, logrus.NewEntry(logrus.New()))
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

// An agent that ends must not remove the socket that another agent has made in its place.
func TestSocketOfAnotherAgentStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	listen := func() *Listener {
		l, err := Listen(address.Address{Scheme: address.Unix, Path: path}, serving, nil, logrus.NewEntry(logrus.New()))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	first := listen()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second := listen()
	for range 2 {
		first.Close()
		if _, err := os.Lstat(path); err != nil {
			t.Fatalf("want the other agent's\ngot  %v", err)
		}
	}
	second.Close()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in the end\nwant none\ngot  %v", err)
	}
}

func TestOnlyTheHostsCIDIsAdmitted(t *testing.T) {
	for cid, want := range map[uint32]bool{0: false, 1: false, 2: true, 3: false, unix.VMADDR_CID_ANY: false} {
		_, err := admitHost(-1, &unix.SockaddrVM{CID: cid, Port: 7})
		if got := err == nil; got != want {
			t.Errorf("CID %d\nwant admitted %v\ngot  %v", cid, want, err)
		}
	}
}

func TestEveryDescriptorIsClosedInTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := Listen(address.Address{Scheme: address.Unix, Path: path}, serving, nil, logrus.NewEntry(logrus.New()))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go server.Serve(context.Background(), l)
	before := descriptors(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for range 100 {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		client := ttrpc.NewClient(conn)
		if err := inPlace(ctx, client); err != nil {
			t.Fatal(err)
		}
		client.Close()
	}
	for open := 1; open > 0; {
		hungUp := l.HungUp()
		l.room.mu.Lock()
		open = len(l.room.conns)
		l.room.mu.Unlock()
		if open == 0 {
			break
		}
		select {
		case <-hungUp:
		case <-ctx.Done():
			t.Fatalf("%d connections are still open", open)
		}
	}
	if got := descriptors(t); got > before {
		t.Errorf("descriptors\nwant at most %d\ngot  %d", before, got)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
