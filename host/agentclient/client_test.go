package agentclient

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
)

// agent answers each method with a prepared message or error, and records the requests.
type agent struct {
	answers  map[string]any
	before   func(method string) // called before each answer, if set
	requests chan proto.Message
}

func (a *agent) method(desc func() proto.Message, name string) ttrpc.Method {
	return func(_ context.Context, unmarshal func(any) error) (any, error) {
		request := desc()
		if err := unmarshal(request); err != nil {
			return nil, err
		}
		a.requests <- request
		if a.before != nil {
			a.before(name)
		}
		if err, ok := a.answers[name].(error); ok {
			return nil, err
		}
		return a.answers[name], nil
	}
}

// connect serves a and returns a client for it.
func connect(t *testing.T, a *agent) *Client {
	t.Helper()
	return dial(t, serve(t, a), Config{})
}

// serve serves a on a socket of its own.
func serve(t *testing.T, a *agent) net.Listener {
	t.Helper()
	listener := listen(t)
	serveOn(t, a, listener)
	return listener
}

// serveOn serves a until stop is called or the test ends.
func serveOn(t *testing.T, a *agent, listener net.Listener) (stop func()) {
	t.Helper()
	a.requests = make(chan proto.Message, 64)
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	services := map[string]map[string]ttrpc.Method{agentpb.AgentServiceName: {}, agentpb.HealthServiceName: {}, volumepb.VolumeServiceName: {}}
	for _, m := range slices.Concat(agentpb.Methods(), volumepb.Methods()) {
		if _, ok := a.answers[m.Method]; ok {
			services[m.Service][m.Method] = a.method(m.NewRequest, m.Method)
		}
	}
	for name, methods := range services {
		server.RegisterService(name, &ttrpc.ServiceDesc{Methods: methods})
	}
	go server.Serve(context.Background(), listener)
	stop = func() {
		listener.Close()
		server.Close()
	}
	t.Cleanup(stop)
	return stop
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener
}

func dial(t *testing.T, listener net.Listener, config Config) *Client {
	t.Helper()
	c, err := Dial(t.Context(), address.Address{Scheme: address.Unix, Path: listener.Addr().String()}, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestEachCallSendsItsArguments(t *testing.T) {
	empty := &emptypb.Empty{}
	a := &agent{answers: map[string]any{
		"Check": &agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_SERVING}, "Version": &agentpb.VersionCheckResponse{},
		"CreateSandbox": empty, "DestroySandbox": empty, "CreateContainer": empty, "RemoveContainer": empty, "ResizeVolume": empty,
		"GetVolumeStats": &agentpb.VolumeStatsResponse{}, "GetGuestDetails": &agentpb.GuestDetailsResponse{},
	}}
	c, ctx := connect(t, a), t.Context()
	sandbox := &agentpb.CreateSandboxRequest{SandboxId: "s"}
	container := &agentpb.CreateContainerRequest{ContainerId: "c", Storages: []*agentpb.Storage{{Driver: "blk", Source: "02/01"}}}
	for _, call := range []struct {
		do   func() error
		want proto.Message
	}{
		{func() error { return c.Check(ctx) }, &agentpb.CheckRequest{}},
		{func() error { _, err := c.Version(ctx); return err }, &agentpb.CheckRequest{}},
		{func() error { return c.CreateSandbox(ctx, sandbox) }, sandbox},
		{func() error { return c.CreateContainer(ctx, container) }, container},
		{func() error { return c.RemoveContainer(ctx, "c") }, &agentpb.RemoveContainerRequest{ContainerId: "c"}},
		{func() error { _, err := c.GetVolumeStats(ctx, "/v"); return err }, &agentpb.VolumeStatsRequest{VolumeGuestPath: "/v"}},
		{func() error { return c.ResizeVolume(ctx, "/v", 7) }, &agentpb.ResizeVolumeRequest{VolumeGuestPath: "/v", Size_: 7}},
		{func() error { _, err := c.GetGuestDetails(ctx); return err }, &agentpb.GuestDetailsRequest{MemBlockSize: true, MemHotplugProbe: true}},
		{func() error { return c.DestroySandbox(ctx) }, &agentpb.DestroySandboxRequest{}},
	} {
		if err := call.do(); err != nil {
			t.Errorf("%T: %v", call.want, err)
			continue
		}
		if got := <-a.requests; !reflect.DeepEqual(got, call.want) {
			t.Errorf("want %T %+v\ngot  %T %+v", call.want, call.want, got, got)
		}
	}
}

func TestHonestStatsComeBackAsTheyAre(t *testing.T) {
	want := &agentpb.VolumeStatsResponse{
		Usage: []*agentpb.VolumeUsage{
			{Unit: agentpb.VolumeUsage_BYTES, Total: 10, Available: 4, Used: 5},
			{Unit: agentpb.VolumeUsage_INODES},
		},
		VolumeCondition: &agentpb.VolumeCondition{Abnormal: true, Message: "device vdb: I/O errors – see the log"},
	}
	got, err := connect(t, &agent{answers: map[string]any{"GetVolumeStats": want}}).GetVolumeStats(t.Context(), "/v")
	if err != nil || !reflect.DeepEqual(want, got) {
		t.Errorf("want %+v\ngot  %+v, %v", want, got, err)
	}
}

func TestInvalidAnswersAreRefused(t *testing.T) {
	stats := func(usage ...*agentpb.VolumeUsage) *agentpb.VolumeStatsResponse {
		return &agentpb.VolumeStatsResponse{Usage: usage}
	}
	condition := func(text string) *agentpb.VolumeStatsResponse {
		return &agentpb.VolumeStatsResponse{VolumeCondition: &agentpb.VolumeCondition{Message: text}}
	}
	const units = agentpb.VolumeUsage_BYTES
	for name, lie := range map[string]any{
		"many usages":    stats(make17()...),
		"no unit":        stats(&agentpb.VolumeUsage{Total: 1}),
		"strange unit":   stats(&agentpb.VolumeUsage{Total: 1, Unit: 9}),
		"available":      stats(&agentpb.VolumeUsage{Total: 1, Available: 2, Unit: units}),
		"used":           stats(&agentpb.VolumeUsage{Total: 1, Used: 2, Unit: units}),
		"huge":           stats(&agentpb.VolumeUsage{Total: 1 << 63, Unit: units}),
		"long message":   condition(strings.Repeat("x", 5<<10)),
		"no UTF-8":       condition("\xff\xfe"),
		"other message":  &agentpb.HealthCheckResponse{Status: 3},
		"text as number": &agentpb.Metrics{Metrics: "\x08"},
	} {
		_, err := connect(t, &agent{answers: map[string]any{"GetVolumeStats": lie}}).GetVolumeStats(t.Context(), "/v")
		if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "is invalid") && !strings.Contains(err.Error(), "malformed") {
			t.Errorf("%s\nwant an error that says so\ngot  %v", name, err)
		}
	}
	for name, lie := range map[string]*agentpb.AgentDetails{
		"many handlers": {StorageHandlers: make([]string, 65)},
		"no UTF-8":      {ExtraFeatures: []string{"\xff"}},
		"long version":  {Version: strings.Repeat("x", 5<<10)},
	} {
		answer := &agentpb.GuestDetailsResponse{AgentDetails: lie}
		_, err := connect(t, &agent{answers: map[string]any{"GetGuestDetails": answer}}).GetGuestDetails(t.Context())
		if err == nil || !strings.Contains(err.Error(), "is invalid") {
			t.Errorf("%s\nwant an error that calls the answer invalid\ngot  %v", name, err)
		}
	}
	answer := &agentpb.VersionCheckResponse{AgentVersion: "\xff"}
	if _, err := connect(t, &agent{answers: map[string]any{"Version": answer}}).Version(t.Context()); err == nil || !strings.Contains(err.Error(), "is invalid") {
		t.Errorf("version\nwant an error that calls the answer invalid\ngot  %v", err)
	}
}

func make17() []*agentpb.VolumeUsage {
	usages := make([]*agentpb.VolumeUsage, 17)
	for i := range usages {
		usages[i] = &agentpb.VolumeUsage{Unit: agentpb.VolumeUsage_BYTES}
	}
	return usages
}

func TestTextsReachNoTerminalRaw(t *testing.T) {
	a := &agent{answers: map[string]any{
		"GetVolumeStats": &agentpb.VolumeStatsResponse{VolumeCondition: &agentpb.VolumeCondition{Message: "a\x1b[2Jb\nc"}},
		"ResizeVolume":   status.Error(codes.FailedPrecondition, "a\x1b[2Jb\n"+strings.Repeat("c", maxAnswer/2)),
	}}
	c := connect(t, a)
	stats, err := c.GetVolumeStats(t.Context(), "/v")
	if err != nil {
		t.Fatal(err)
	}
	if want, got := "a [2Jb c", stats.VolumeCondition.Message; got != want {
		t.Errorf("want %q\ngot  %q", want, got)
	}
	text := c.ResizeVolume(t.Context(), "/v", 1).Error()
	if !strings.Contains(text, "a [2Jb ccc") || len(text) > 5<<10 || !utf8.ValidString(text) {
		t.Errorf("want a bounded line with %q\ngot  %d bytes: %.80q", "a [2Jb ccc", len(text), text)
	}
}

func TestErrorsKeepTheirCodeAndNameTheCall(t *testing.T) {
	c := connect(t, &agent{answers: map[string]any{
		"ResizeVolume": status.Error(codes.OutOfRange, "smaller than the filesystem"),
		"Check":        &agentpb.HealthCheckResponse{Status: agentpb.HealthCheckResponse_NOT_SERVING},
	}})
	for name, check := range map[string]struct {
		err  error
		code codes.Code
		text string
	}{
		"refused":       {c.ResizeVolume(t.Context(), "/v", 1), codes.OutOfRange, "ResizeVolume at " + c.address.String() + ": smaller than"},
		"not ready":     {c.Check(t.Context()), codes.Unavailable, "not ready: NOT_SERVING"},
		"unimplemented": {c.DestroySandbox(t.Context()), codes.Unimplemented, "DestroySandbox"},
	} {
		if got := status.Code(check.err); got != check.code || !strings.Contains(check.err.Error(), check.text) {
			t.Errorf("%s\nwant %v with %q\ngot  %v: %v", name, check.code, check.text, got, check.err)
		}
	}
}

// hasten gives a connected client a Timeout that would be too short for connecting on a busy
// machine.
func hasten(c *Client, timeout time.Duration) *Client {
	c.timeout, c.link.conn.limit = timeout, timeout
	return c
}

func TestCallWithoutDeadlineEnds(t *testing.T) {
	c := hasten(dial(t, listen(t), Config{Timeout: time.Hour}), 20*time.Millisecond)
	if got := status.Code(c.Check(context.Background())); got != codes.DeadlineExceeded {
		t.Errorf("want %v\ngot  %v", codes.DeadlineExceeded, got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := status.Code(c.Check(ctx)); got != codes.Canceled {
		t.Errorf("want %v\ngot  %v", codes.Canceled, got)
	}
}

func TestGuestThatDoesNotReadHoldsNobodyUp(t *testing.T) {
	large := &agentpb.CreateSandboxRequest{Hostname: strings.Repeat("x", 3<<20)}
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	for name, call := range map[string]struct {
		ctx   context.Context
		limit time.Duration // of a write
	}{
		"the write's limit": {context.Background(), 20 * time.Millisecond},
		"the call's":        {soon, time.Hour},
	} {
		c := hasten(dial(t, listen(t), Config{Timeout: time.Hour}), call.limit) // Nothing accepts this connection.
		if err := c.CreateSandbox(call.ctx, large); status.Code(err) != codes.DeadlineExceeded || errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("%s\nwant %v, and no doubt about a request that was cut short\ngot  %v", name, codes.DeadlineExceeded, err)
		}
	}
}

// hostile answers on every connection with the same bytes. It returns the listener to dial.
func hostile(t *testing.T, answer string) net.Listener {
	t.Helper()
	listener := listen(t)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				conn.Read(make([]byte, 1))
				io.WriteString(conn, answer)
				io.Copy(io.Discard, conn)
			}()
		}
	}()
	return listener
}

func TestCallIsNotRepeatedAfterAnInvalidAnswer(t *testing.T) {
	for name, garbage := range map[string]string{
		"text":      "HTTP/1.1 400 Bad Request\r\n\r\n",
		"request":   "\x00\x00\x00\x00\x00\x00\x00\x01\x01\x00",
		"stranger":  "\x00\x00\x00\x00\x00\x00\x00\x03\x02\x00",
		"oversize":  "\x7f\xff\xff\xff\x00\x00\x00\x01\x02\x00" + strings.Repeat("x", 1<<10),
		"no status": "\x00\x00\x00\x02\x00\x00\x00\x01\x02\x00\x0a\x7f",
	} {
		c := dial(t, hostile(t, garbage), Config{Timeout: time.Hour})
		err := c.Check(t.Context())
		if status.Code(err) != codes.Internal || errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("%s\nwant %v\ngot  %v", name, codes.Internal, err)
		}
		c = dial(t, hostile(t, garbage), Config{Timeout: time.Hour})
		if err := c.DestroySandbox(t.Context()); status.Code(err) != codes.Internal || !errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("%s\nwant %v and %v\ngot  %v", name, codes.Internal, ErrOutcomeUnknown, err)
		}
	}
}

func TestDialErrorNamesTheAddress(t *testing.T) {
	a := address.Address{Scheme: address.Unix, Path: filepath.Join(t.TempDir(), "missing")}
	if _, err := Dial(t.Context(), a, Config{}); err == nil || !strings.Contains(err.Error(), a.String()) {
		t.Errorf("want an error with %q\ngot  %v", a, err)
	}
}

// A caller replaces the calls of directvol's own service by others. All other refusals keep their
// meaning. The second text is kata-agent's.
func TestAgentWithoutTheServiceIsKnownByItsAnswer(t *testing.T) {
	for err, lacks := range map[error]bool{
		status.Error(codes.Unimplemented, "unknown method"):                                                                              true,
		status.Error(codes.InvalidArgument, "directvol.v1.VolumeService service does not exist"):                                         true,
		&callError{method: watchVolumes, status: status.New(codes.InvalidArgument, "directvol.v1.VolumeService service does not exist")}: true,
		status.Error(codes.InvalidArgument, "volume_guest_path: not a path"):                                                             false,
		status.Error(codes.FailedPrecondition, "cannot grow"):                                                                            false,
		nil: false,
	} {
		if got := LacksService(err); got != lacks {
			t.Errorf("%v\nwant %v\ngot  %v", err, lacks, got)
		}
	}
}
