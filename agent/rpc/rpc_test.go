package rpc

import (
	"context"
	"errors"
	"io"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/frame"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
)

func newAgent() *Agent {
	log := logrus.New()
	log.SetOutput(io.Discard)
	entry := logrus.NewEntry(log)
	volumes := volume.NewTable(health.NewMonitor(entry))
	storages := storage.NewTable(entry, volumes, time.Millisecond, nil)
	return &Agent{Log: entry, Version: "1", Volumes: volumes, Sandbox: sandbox.New(entry, storages), Storages: storages, Destroyed: func() {}}
}

// A name that is misspelt would be registered, and never called.
func TestEveryMethodIsOneOfTheWireAndTakesItsRequest(t *testing.T) {
	wire := map[string]service.MethodDesc{}
	for _, m := range slices.Concat(agentpb.Methods(), volumepb.Methods()) {
		wire[m.Service+"/"+m.Method] = m
	}
	errSeen := errors.New("seen")
	for name, methods := range newAgent().services() {
		for method, call := range methods {
			desc, ok := wire[name+"/"+method]
			if !ok {
				t.Errorf("%s/%s is no method of the wire", name, method)
				continue
			}
			want := reflect.TypeOf(desc.NewRequest())
			_, err := call(t.Context(), func(request any) error {
				if got := reflect.TypeOf(request); got != want {
					t.Errorf("the request of %s/%s\nwant %v\ngot  %v", name, method, want, got)
				}
				return errSeen
			})
			if status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s/%s, of a payload that does not decode\nwant InvalidArgument\ngot  %v", name, method, err)
			}
		}
	}
}

// answer calls a method that does what f does.
func answer(ctx context.Context, f func() error) error {
	call := method(newAgent(), "Test", func(context.Context, *emptypb.Empty) (*emptypb.Empty, error) { return nothing, f() })
	_, err := call(ctx, func(any) error { return nil })
	return err
}

func TestEveryKindOfRefusalHasItsCode(t *testing.T) {
	want := map[refusal.Kind]codes.Code{
		refusal.Internal: codes.Internal, refusal.InvalidArgument: codes.InvalidArgument, refusal.NotFound: codes.NotFound,
		refusal.AlreadyExists: codes.AlreadyExists, refusal.FailedPrecondition: codes.FailedPrecondition, refusal.OutOfRange: codes.OutOfRange,
		refusal.DeadlineExceeded: codes.DeadlineExceeded, refusal.Unimplemented: codes.Unimplemented,
	}
	for kind := refusal.Internal; kind <= refusal.Unimplemented; kind++ {
		err := answer(t.Context(), func() error { return refusal.New(kind, "of kind %d", kind) })
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

// An error that comes of the caller's own impatience is not the agent's failure.
func TestFailureOfACallThatIsOverIsItsDeadline(t *testing.T) {
	for want, err := range map[codes.Code]error{
		codes.DeadlineExceeded: errors.New("cut short"),
		codes.NotFound:         refusal.New(refusal.NotFound, "not there, in time or not"),
	} {
		ending, end := context.WithCancel(t.Context())
		if got := answer(ending, func() error { end(); return err }); status.Code(got) != want {
			t.Errorf("want %v\ngot  %v", want, got)
		}
	}
}

func TestPanicEndsItsCallAlone(t *testing.T) {
	err := answer(t.Context(), func() error { panic("a bug") })
	if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "goroutine") {
		t.Errorf("want an Internal without a stack\ngot  %v", err)
	}
}

func TestContainerIDsAreFileNames(t *testing.T) {
	for id, fine := range map[string]bool{
		"c1": true, "0a1b-2_3.4": true, strings.Repeat("x", 255): true,
		"": false, "x": false, ".hidden": false, "..": false, "a/b": false, "a b": false, "a\n": false, "ä1": false, strings.Repeat("x", 256): false,
	} {
		err := checkContainerID(id)
		if (err == nil) != fine || err != nil && refusal.KindOf(err) != refusal.InvalidArgument {
			t.Errorf("%.20q: fine %v\ngot error %v", id, fine, err)
		}
	}
}

func TestCallWaitsForTheGuestToBeReady(t *testing.T) {
	a := newAgent()
	ready := make(chan struct{})
	a.Ready = ready
	call := method(a, "Test", func(context.Context, *emptypb.Empty) (*emptypb.Empty, error) { return nothing, nil })
	soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	<-soon.Done()
	for range 100 { // it is the deadline that is told, though there are modules to wait for
		if _, err := call(soon, func(any) error { return nil }); status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "over when it arrived") {
			t.Fatalf("of a call whose time was over\nwant DeadlineExceeded, and that said\ngot  %v", err)
		}
	}
	waits, giveUp := context.WithCancel(t.Context())
	waited := make(chan error)
	go func() {
		_, err := call(waits, func(any) error { return nil })
		waited <- err
	}()
	giveUp()
	if err := <-waited; status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("before\nwant DeadlineExceeded\ngot  %v", err)
	}
	answered := make(chan error)
	go func() {
		_, err := call(t.Context(), func(any) error { return nil })
		answered <- err
	}()
	close(ready)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

// Kata's RemoveContainer has a limit of its own, in seconds, beside the call's.
func TestRemoveContainerWaitsNoLongerThanItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, end := newAgent(), make(chan struct{})
		go a.Sandbox.Behind(t.Context(), "busy", func(context.Context) error {
			<-end
			return nil
		})
		synctest.Wait()
		defer close(end)
		began := time.Now()
		_, err := a.removeContainer(t.Context(), &agentpb.RemoveContainerRequest{ContainerId: "busy", Timeout: 2})
		if took := time.Since(began); refusal.KindOf(err) != refusal.DeadlineExceeded || took > 2*time.Second {
			t.Errorf("want a DeadlineExceeded within 2 s\ngot  %v after %v", err, took)
		}
	})
}

func TestContainerIDThatIsTooLongIsSaidToBe(t *testing.T) {
	err := checkContainerID(strings.Repeat("a", 256))
	if refusal.KindOf(err) != refusal.InvalidArgument || !strings.Contains(err.Error(), "255") {
		t.Errorf("want an InvalidArgument with 255\ngot  %v", err)
	}
}

func TestDrainWaitsForTheCallsUnderWay(t *testing.T) {
	a := newAgent()
	began, end := make(chan struct{}), make(chan struct{})
	call := method(a, "Test", func(context.Context, *emptypb.Empty) (*emptypb.Empty, error) {
		close(began)
		<-end
		return nothing, nil
	})
	answered := make(chan error)
	go func() {
		_, err := call(t.Context(), func(any) error { return nil })
		answered <- err
	}()
	<-began
	drained := make(chan struct{})
	go func() {
		a.Drain(t.Context())
		close(drained)
	}()
	for a.calls.TryRLock() { // it fails as soon as Drain waits
		a.calls.RUnlock()
		runtime.Gosched()
	}
	select {
	case <-drained:
		t.Error("it did not wait")
	default:
	}
	if _, err := call(t.Context(), func(any) error { return nil }); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "nothing was done") {
		t.Errorf("a call that comes then\nwant Unavailable\ngot  %v", err)
	}
	close(end)
	<-drained
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

func TestQuickAnswersWhatItKnowsAndNoMore(t *testing.T) {
	a := newAgent()
	request := func(service, method string, payload []byte) *frame.Request {
		return &frame.Request{Service: []byte(service), Method: []byte(method), Payload: payload}
	}
	response, ok := a.Quick(request(agentpb.HealthServiceName, "Check", nil))
	var health agentpb.HealthCheckResponse
	if err := health.Unmarshal(response); !ok || err != nil || health.Status != agentpb.HealthCheckResponse_SERVING {
		t.Errorf("Check\nwant SERVING\ngot  %v (%v, error %v)", health.Status, ok, err)
	}
	unknown, err := (&agentpb.VolumeStatsRequest{VolumeGuestPath: "/nothing"}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]*frame.Request{
		"a check with a payload":     request(agentpb.HealthServiceName, "Check", []byte{0x0a, 0}),
		"another service's check":    request(agentpb.AgentServiceName, "Check", nil),
		"another method":             request(agentpb.AgentServiceName, "GetGuestDetails", nil),
		"stats of what is no volume": request(agentpb.AgentServiceName, "GetVolumeStats", unknown),
		"stats that do not decode":   request(agentpb.AgentServiceName, "GetVolumeStats", []byte{0xff}),
		"nothing":                    request("", "", nil),
	} {
		if response, ok := a.Quick(r); ok {
			t.Errorf("%s: want it left to the service\ngot  % x", name, response)
		}
	}
}
