package rpc

import (
	"context"
	"errors"
	"io"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/protocols/volumepb"
)

func newAgent() *Agent {
	log := logrus.New()
	log.SetOutput(io.Discard)
	entry := logrus.NewEntry(log)
	volumes := volume.NewTable(health.NewMonitor(entry))
	storages := storage.NewTable(entry, volumes, time.Millisecond, nil)
	return &Agent{Log: entry, Version: "1", Volumes: volumes, Sandbox: sandbox.New(entry, storages), Storages: storages, Destroyed: func() {}, Counts: new(metrics.Calls)}
}

// A misspelt name would be registered and never called.
func TestEveryMethodIsOneOfTheWireAndTakesItsRequest(t *testing.T) {
	wire := map[string]service.MethodDesc{}
	for _, m := range slices.Concat(agentpb.Methods(), volumepb.Methods()) {
		wire[m.Service+"/"+m.Method] = m
	}
	errSeen := errors.New("seen")
	for name, methods := range newAgent().Calls() {
		for method, call := range methods {
			desc, ok := wire[name+"/"+method]
			if !ok {
				t.Errorf("%s/%s is no method of the wire", name, method)
				continue
			}
			want := reflect.TypeOf(desc.NewRequest())
			if desc.Streams != (call.Stream.Handler != nil) || desc.Streams == (call.Answer != nil) {
				t.Errorf("%s/%s\nwant a stream of answers: %v", name, method, desc.Streams)
				continue
			}
			take := func(request any) error {
				if got := reflect.TypeOf(request); got != want {
					t.Errorf("the request of %s/%s\nwant %v\ngot  %v", name, method, want, got)
				}
				return errSeen
			}
			var err error
			if desc.Streams {
				_, err = call.Stream.Handler(t.Context(), undecoded(take))
			} else {
				_, err = call.Answer(t.Context(), take)
			}
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s/%s, of a payload that does not decode\nwant InvalidArgument\ngot  %v", name, method, err)
			}
		}
	}
}

// undecoded is the stream of a request that does not decode.
type undecoded func(request any) error

func (u undecoded) RecvMsg(request any) error { return u(request) }
func (undecoded) SendMsg(any) error           { return errors.New("nothing is answered") }

// answer calls a method that runs f.
func answer(ctx context.Context, f func() error) error {
	call := method(func(context.Context, *emptypb.Empty) (*emptypb.Empty, error) { return nothing, f() })
	_, err := call(ctx, func(any) error { return nil })
	return err
}

func TestEveryKindOfRefusalHasItsCode(t *testing.T) {
	want := map[errkind.Kind]codes.Code{
		errkind.Internal: codes.Internal, errkind.InvalidArgument: codes.InvalidArgument, errkind.NotFound: codes.NotFound,
		errkind.AlreadyExists: codes.AlreadyExists, errkind.FailedPrecondition: codes.FailedPrecondition, errkind.OutOfRange: codes.OutOfRange,
		errkind.DeadlineExceeded: codes.DeadlineExceeded, errkind.Unimplemented: codes.Unimplemented, errkind.Aborted: codes.Aborted,
	}
	for kind := errkind.Internal; kind <= errkind.Aborted; kind++ {
		err := answer(t.Context(), func() error { return errkind.New(kind, "of kind %d", kind) })
		if got := status.Code(err); got != want[kind] || got == codes.OK {
			t.Errorf("kind %d\nwant %v\ngot  %v", kind, want[kind], err)
		}
	}
	if got := status.Code(answer(t.Context(), func() error { return errors.New("no kind") })); got != codes.Internal {
		t.Errorf("an error without a kind\nwant %v\ngot  %v", codes.Internal, got)
	}
	if err := answer(t.Context(), func() error { return nil }); err != nil {
		t.Errorf("want no error\ngot  %v", err)
	}
}

// An error caused by the caller's own deadline is not a failure of the agent.
func TestFailureAfterTheDeadlineIsDeadlineExceeded(t *testing.T) {
	for want, err := range map[codes.Code]error{
		codes.DeadlineExceeded: errors.New("cut short"),
		codes.NotFound:         errkind.New(errkind.NotFound, "not there, in time or not"),
	} {
		ending, end := context.WithCancel(t.Context())
		if got := answer(ending, func() error { end(); return err }); status.Code(got) != want {
			t.Errorf("want %v\ngot  %v", want, got)
		}
	}
}

// busy has storages whose Hold does not return before end, even if its caller gives up.
type busy struct {
	oneHolder
	end chan struct{}
}

func (b busy) Hold(context.Context, string, []*agentpb.Storage, func() bool) error {
	<-b.end
	return errors.New("ended")
}

func (busy) Waiting(...string) []string { return nil }

// Kata's RemoveContainer has its own time-out, in seconds, in addition to the call's.
func TestRemoveContainerWaitsNoLongerThanItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, end := newAgent(), make(chan struct{})
		a.Sandbox = sandbox.New(a.Log, busy{end: end})
		go a.Sandbox.CreateContainer(t.Context(), "busy", nil, nil)
		synctest.Wait()
		defer close(end)
		began := time.Now()
		_, err := a.removeContainer(t.Context(), &agentpb.RemoveContainerRequest{ContainerId: "busy", Timeout: 2})
		if took := time.Since(began); errkind.Of(err) != errkind.DeadlineExceeded || took > 2*time.Second {
			t.Errorf("want a DeadlineExceeded within 2 s\ngot  %v after %v", err, took)
		}
	})
}

func TestQuickAnswersOnlyTheCallsItKnows(t *testing.T) {
	a := newAgent()
	response, ok := quickCheck(&ttrpcframe.Request{})
	var health agentpb.HealthCheckResponse
	if err := health.Unmarshal(response); !ok || err != nil || health.Status != agentpb.HealthCheckResponse_SERVING {
		t.Errorf("Check\nwant SERVING\ngot  %v (%v, error %v)", health.Status, ok, err)
	}
	unknown, err := (&agentpb.VolumeStatsRequest{VolumeGuestPath: "/nothing"}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		quick   transport.Quick
		payload []byte
	}{
		"a check with a payload":         {quickCheck, []byte{0x0a, 0}},
		"stats of what is no volume":     {a.quickStats, unknown},
		"stats that do not decode":       {a.quickStats, []byte{0xff}},
		"a growth of what is no volume":  {a.quickResize, unknown},
		"a growth that does not decode":  {a.quickResize, []byte{0xff}},
		"a growth of nothing to nothing": {a.quickResize, nil},
	} {
		if response, ok := test.quick(&ttrpcframe.Request{Payload: test.payload}); ok {
			t.Errorf("%s: want it left to the service\ngot  % x", name, response)
		}
	}
}
