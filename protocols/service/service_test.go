package service_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
)

// serve serves methods as the agent's service and returns a client.
func serve(t *testing.T, methods map[string]ttrpc.Method, options ...ttrpc.ClientOpts) *ttrpc.Client {
	t.Helper()
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	server.RegisterService(agentpb.AgentServiceName, &ttrpc.ServiceDesc{Methods: methods})
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(context.Background(), listener)
	t.Cleanup(func() { server.Close() })
	conn, err := net.Dial("unix", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(conn, options...)
	t.Cleanup(func() { client.Close() })
	return client
}

func resize(t *testing.T, client *ttrpc.Client) error {
	t.Helper()
	_, err := service.Call[emptypb.Empty](t.Context(), client, agentpb.AgentServiceName, "ResizeVolume", &agentpb.ResizeVolumeRequest{})
	return err
}

func TestCallReachesMethod(t *testing.T) {
	client := serve(t, map[string]ttrpc.Method{
		"GetVolumeStats": service.Method(func(_ context.Context, r *agentpb.VolumeStatsRequest) (*agentpb.VolumeStatsResponse, error) {
			return &agentpb.VolumeStatsResponse{VolumeCondition: &agentpb.VolumeCondition{Message: "seen " + r.VolumeGuestPath}}, nil
		}),
	})
	got, err := service.Call[agentpb.VolumeStatsResponse](t.Context(), client, agentpb.AgentServiceName, "GetVolumeStats",
		&agentpb.VolumeStatsRequest{VolumeGuestPath: "/p"})
	if err != nil {
		t.Fatal(err)
	}
	if want := "seen /p"; got.VolumeCondition.Message != want {
		t.Errorf("want %q\ngot  %q", want, got.VolumeCondition.Message)
	}
}

func TestMethodThatIsNotBuiltIsUnimplemented(t *testing.T) {
	client := serve(t, nil)
	if want, got := codes.Unimplemented, status.Code(resize(t, client)); got != want {
		t.Errorf("want %v\ngot  %v", want, got)
	}
}

func TestMalformedPayloadIsInvalidArgumentAndTheConnectionLives(t *testing.T) {
	var payload []byte
	replace := func(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
		request.Payload = payload
		return invoke(ctx, request, response)
	}
	client := serve(t, map[string]ttrpc.Method{
		"ResizeVolume": service.Method(func(_ context.Context, r *agentpb.ResizeVolumeRequest) (*emptypb.Empty, error) {
			if payload != nil {
				t.Errorf("the method was called with %+v of a payload that does not decode", r)
			}
			return &emptypb.Empty{}, nil
		}),
	}, ttrpc.WithUnaryClientInterceptor(replace))
	for name, malformed := range map[string][]byte{
		"truncated": {0x0a, 0x7f, 'x'}, "wrong type": {0x08, 0x01}, "half a tag": {0xff}, "field 0": {0x00, 0x01},
	} {
		payload = malformed
		if want, got := codes.InvalidArgument, status.Code(resize(t, client)); got != want {
			t.Errorf("%s\nwant %v\ngot  %v", name, want, got)
		}
	}
	payload = nil
	if err := resize(t, client); err != nil {
		t.Errorf("after malformed payloads\nwant no error\ngot  %v", err)
	}
}

// ttrpc drops the connection if a status's text is not UTF-8 or makes the frame too long.
func TestAnyErrorFitsTheWire(t *testing.T) {
	var failure error
	client := serve(t, map[string]ttrpc.Method{
		"ResizeVolume": service.Method(func(context.Context, *agentpb.ResizeVolumeRequest) (*emptypb.Empty, error) { return nil, failure }),
	})
	for name, c := range map[string]struct {
		failure error
		code    codes.Code
		text    string
	}{
		"status":         {status.Error(codes.OutOfRange, "smaller"), codes.OutOfRange, "smaller"},
		"wrapped status": {fmt.Errorf("resize: %w", status.Error(codes.OutOfRange, "smaller")), codes.OutOfRange, "smaller"},
		"missing file":   {&fs.PathError{Op: "open", Path: "/x", Err: fs.ErrNotExist}, codes.NotFound, "open /x"},
		"plain":          {errors.New("broken"), codes.Unknown, "broken"},
		"no UTF-8":       {status.Error(codes.NotFound, "path \xff\xfe"), codes.NotFound, "path "},
		"plain no UTF-8": {errors.New("path \xff"), codes.Unknown, "path "},
		"oversize":       {status.Error(codes.NotFound, strings.Repeat("x", 5<<20)), codes.NotFound, "xxx"},
		"cut in a rune":  {status.Error(codes.NotFound, strings.Repeat("é", 5<<10)), codes.NotFound, "éé"},
	} {
		failure = c.failure
		err := resize(t, client)
		if got := status.Code(err); got != c.code {
			t.Errorf("%s\nwant %v\ngot  %v: %v", name, c.code, got, err)
		}
		if text := status.Convert(err).Message(); !strings.Contains(text, c.text) || len(text) > 4<<10 || !utf8.ValidString(text) {
			t.Errorf("%s\nwant at most 4096 bytes of UTF-8 with %q\ngot  %d: %.80q", name, c.text, len(text), text)
		}
	}
}

func TestCallErrorsHaveACode(t *testing.T) {
	entered := make(chan struct{}, 1)
	client := serve(t, map[string]ttrpc.Method{
		"ResizeVolume": service.Method(func(ctx context.Context, _ *agentpb.ResizeVolumeRequest) (*emptypb.Empty, error) {
			entered <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		}),
		"SetPolicy": func(context.Context, func(any) error) (any, error) { return &agentpb.Metrics{Metrics: "text"}, nil },
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-entered
		cancel()
	}()
	call := func(ctx context.Context, method string) codes.Code {
		_, err := service.Call[agentpb.OnlineCPUMemRequest](ctx, client, agentpb.AgentServiceName, method, &agentpb.SetPolicyRequest{})
		return status.Code(err)
	}
	if want, got := codes.Canceled, call(ctx, "ResizeVolume"); got != want {
		t.Errorf("canceled\nwant %v\ngot  %v", want, got)
	}
	if want, got := codes.Internal, call(t.Context(), "SetPolicy"); got != want {
		t.Errorf("text where a number belongs\nwant %v\ngot  %v", want, got)
	}
	client.Close()
	if want, got := codes.Unavailable, call(t.Context(), "SetPolicy"); got != want {
		t.Errorf("closed\nwant %v\ngot  %v", want, got)
	}
}

func TestDescriptionMakesFreshMessages(t *testing.T) {
	for _, m := range agentpb.Methods() {
		if m.Service != "grpc.AgentService" && m.Service != "grpc.Health" || m.Method == "" {
			t.Errorf("method %s/%s", m.Service, m.Method)
		}
	}
	resize := service.Describe[agentpb.ResizeVolumeRequest, agentpb.Metrics]("s", "m")
	request, ok := resize.NewRequest().(*agentpb.ResizeVolumeRequest)
	if !ok {
		t.Fatalf("want a request of its type\ngot  %T", resize.NewRequest())
	}
	request.Size_ = 1
	if again := resize.NewRequest().(*agentpb.ResizeVolumeRequest); again.Size_ != 0 {
		t.Error("a second request is the first one")
	}
	if _, ok := resize.NewResponse().(*agentpb.Metrics); !ok {
		t.Errorf("want a response of its type\ngot  %T", resize.NewResponse())
	}
}
