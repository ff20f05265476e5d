package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
)

type send = func(*agentpb.VersionCheckResponse) error

// streaming returns a call that is answered by f with a stream.
func streaming(f func(context.Context, send) error) Call {
	return Call{Stream: service.Stream(func(ctx context.Context, _ *agentpb.CheckRequest, send func(*agentpb.VersionCheckResponse) error) error {
		return f(ctx, send)
	})}
}

// received returns the versions that a stream has sent, and the error that ended it. each is called
// for each of them.
func received(t *testing.T, client *ttrpc.Client, each func()) (versions []string, err error) {
	t.Helper()
	for message, err := range service.Receive[agentpb.VersionCheckResponse](t.Context(), client, name, "Version", &agentpb.CheckRequest{}) {
		if err != nil {
			return versions, err
		}
		versions = append(versions, message.AgentVersion)
		each()
	}
	return versions, nil
}

func TestStreamSendsUntilItEnds(t *testing.T) {
	for _, test := range []struct {
		failure error
		code    codes.Code
	}{
		{nil, codes.OK},
		{status.Error(codes.NotFound, "gone"), codes.NotFound},
		{errors.New("broken"), codes.Unknown},
	} {
		s, client := listening(t, Calls{name: {"Version": streaming(func(_ context.Context, send send) error {
			for i := range 3 {
				if err := send(&agentpb.VersionCheckResponse{AgentVersion: fmt.Sprint(i)}); err != nil {
					return err
				}
			}
			return test.failure
		})}})
		versions, err := received(t, client, func() {})
		if strings.Join(versions, " ") != "0 1 2" || status.Code(err) != test.code {
			t.Errorf("want 0 1 2 and %v\ngot  %v and %v", test.code, versions, err)
		}
		if err := s.listener.Answered(t.Context()); err != nil {
			t.Errorf("the ended stream still counts as a call: %v", err)
		}
		var text metrics.Text
		s.Counts.Write(&text)
		if want := fmt.Sprintf(`code="%v"} 1`, test.code); !strings.Contains(text.String(), want) {
			t.Errorf("want %s\ngot  %s", want, text.String())
		}
	}
}

// A Shutdown does not wait for a stream that its caller could keep for ever.
func TestShutdownEndsStreams(t *testing.T) {
	s, client := listening(t, Calls{name: {"Version": streaming(func(ctx context.Context, send send) error {
		if err := send(&agentpb.VersionCheckResponse{}); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	})}})
	began := make(chan struct{})
	ended := make(chan error)
	go func() {
		_, err := received(t, client, func() { close(began) })
		ended <- err
	}()
	<-began
	if err := s.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "ending") {
		t.Errorf("the stream\nwant Unavailable and why\ngot  %v", err)
	}
}

func TestStreamIsRefusedWhileTheServerEnds(t *testing.T) {
	s, client := listening(t, Calls{name: {"Version": streaming(func(context.Context, send) error {
		t.Error("it was answered")
		return nil
	})}})
	defer s.ended(t)()
	if _, err := received(t, client, func() {}); status.Code(err) != codes.Unavailable {
		t.Errorf("want Unavailable\ngot  %v", err)
	}
}

func TestPanicEndsItsStreamAlone(t *testing.T) {
	s, client := listening(t, Calls{name: {"Version": streaming(func(context.Context, send) error { panic("a bug") })}})
	if _, err := received(t, client, func() {}); status.Code(err) != codes.Internal || strings.Contains(err.Error(), "goroutine") {
		t.Errorf("want an Internal without a stack\ngot  %v", err)
	}
	if !s.calls.TryLock() {
		t.Error("the stream is still under way")
	}
}

// The caller's end is the stream's end: nothing else tells the handler.
func TestStreamEndsWithItsConnection(t *testing.T) {
	ended := make(chan struct{})
	_, client := listening(t, Calls{name: {"Version": streaming(func(ctx context.Context, send send) error {
		defer close(ended)
		if err := send(&agentpb.VersionCheckResponse{}); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	})}})
	_, _ = received(t, client, func() { client.Close() })
	<-ended
}

// Other calls on the connection are answered while a stream is open.
func TestStreamHoldsUpNoOtherCall(t *testing.T) {
	const messages = 20
	_, client := listening(t, Calls{name: {
		"Test": {Answer: service.Method(func(context.Context, *agentpb.CheckRequest) (*agentpb.VersionCheckResponse, error) {
			return &agentpb.VersionCheckResponse{}, nil
		})},
		"Version": streaming(func(_ context.Context, send send) error {
			for range messages {
				if err := send(&agentpb.VersionCheckResponse{}); err != nil {
					return err
				}
			}
			return nil
		}),
	}})
	got, err := received(t, client, func() {
		if err := call(t, client, "Test"); err != nil {
			t.Errorf("beside a stream: %v", err)
		}
	})
	if len(got) != messages || err != nil {
		t.Errorf("want %d messages\ngot  %d, %v", messages, len(got), err)
	}
}
