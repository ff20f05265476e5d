package volumes

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/agent/rpc"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

// frameMax is the maximum length of a frame after its header, in bytes (ttrpc's PROTOCOL.md).
const frameMax = 4 * miB

// wire is a connection to the agent on which a test writes arbitrary bytes.
type wire struct {
	net.Conn
	t *testing.T
}

func dialWire(t *testing.T, g *vm.Guest) wire {
	t.Helper()
	conn := dialPort(t, g, agentpb.Port)
	must(t, conn.SetDeadline(time.Now().Add(vm.Limit(callLimit))))
	return wire{conn, t}
}

// dialPort connects to a vsock port of the guest, for as long as the test runs.
func dialPort(t *testing.T, g *vm.Guest, port uint32) net.Conn {
	t.Helper()
	conn, err := g.Dial(limited(t), port)
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// framed makes a frame with a correct header.
func framed(stream uint32, kind ttrpcframe.Type, payload []byte) []byte {
	return append(header(uint32(len(payload)), stream, kind), payload...)
}

func header(length, stream uint32, kind ttrpcframe.Type) []byte {
	return ttrpcframe.Header{Length: length, StreamID: stream, Type: kind}.Append(nil)
}

// call makes the frame of a call.
func call(t *testing.T, stream uint32, service, method string, payload []byte) []byte {
	t.Helper()
	request, err := proto.Marshal(&ttrpc.Request{Service: service, Method: method, Payload: payload})
	must(t, err)
	return framed(stream, ttrpcframe.TypeRequest, request)
}

func (w wire) send(bytes []byte) {
	w.t.Helper()
	_, err := w.Write(bytes)
	must(w.t, err)
}

// answer receives the answer to a call, and returns its stream and its error.
func (w wire) answer() (stream uint32, _ error) {
	w.t.Helper()
	var first [ttrpcframe.HeaderBytes]byte
	_, err := io.ReadFull(w, first[:])
	must(w.t, err)
	head := ttrpcframe.ParseHeader(first[:])
	if head.Type != ttrpcframe.TypeResponse || head.Length > frameMax {
		w.t.Fatalf("no answer: %+v", head)
	}
	payload := make([]byte, head.Length)
	_, err = io.ReadFull(w, payload)
	must(w.t, err)
	var response ttrpc.Response
	must(w.t, proto.Unmarshal(payload, &response))
	return head.StreamID, status.ErrorProto(response.Status)
}

// hangUp closes our sending side, and waits until the agent has closed the connection: by then the
// agent has read everything.
func (w wire) hangUp() {
	w.t.Helper()
	must(w.t, w.Conn.(interface{ CloseWrite() error }).CloseWrite())
	if _, err := io.Copy(io.Discard, w); err != nil {
		w.t.Errorf("want the agent to close\ngot  %v", err)
	}
}

// undisturbed runs another client while a test misbehaves.
func undisturbed(t *testing.T, g *vm.Guest) {
	t.Helper()
	v := mounted(t, g, "ext4")
	stats(t, v) // from now on the agent answers it at once
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	first := make(chan struct{})
	ask := func() error {
		ctx, cancel := context.WithTimeout(ctx, vm.Limit(callLimit))
		defer cancel()
		_, err := g.Agent().GetVolumeStats(ctx, v.GuestPath)
		return err
	}
	go func() {
		for n := 0; ; n++ {
			if err := ask(); err != nil {
				ended <- err
				return
			}
			if n == 0 {
				close(first)
			}
		}
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; status.Code(err) != codes.Canceled {
			t.Errorf("another client was disturbed: %v", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if _, err := g.Agent().Version(ctx); err != nil {
			t.Error(err)
		}
	})
	select {
	case <-first:
	case err := <-ended:
		t.Fatal(err)
	}
}

func TestBrokenFramesDisturbNobody(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	undisturbed(t, g)
	_, storage := attached(t, g, "xfs")
	request, err := (&agentpb.CreateContainerRequest{ContainerId: "truncated", Storages: []*agentpb.Storage{storage}}).Marshal()
	must(t, err)
	whole := call(t, 1, agentpb.AgentServiceName, "CreateContainer", request)
	noise := make([]byte, 8*kiB)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise)
	for name, sent := range map[string][]byte{
		"nothing":                 nil,
		"half a header":           whole[:ttrpcframe.HeaderBytes/2],
		"a header and no more":    whole[:ttrpcframe.HeaderBytes],
		"all but the last byte":   whole[:len(whole)-1],
		"more than there may be":  append(header(1<<30, 1, ttrpcframe.TypeRequest), whole...),
		"as much as can be said":  append(header(1<<32-1, 1, ttrpcframe.TypeRequest), whole...),
		"another protocol":        []byte("GET / HTTP/1.1\r\nHost: agent\r\n\r\n"),
		"noise":                   noise,
		"a frame of no kind":      framed(1, 9, whole),
		"an answer":               framed(1, ttrpcframe.TypeResponse, whole),
		"zeros, which are frames": make([]byte, 100*ttrpcframe.HeaderBytes),
	} {
		t.Run(name, func(t *testing.T) {
			w := dialWire(t, g)
			w.send(sent)
			w.hangUp()
		})
		t.Run(name+", and reset", func(t *testing.T) {
			w := dialWire(t, g)
			w.send(sent)
			must(t, w.Close())
		})
	}
}

// A request that breaks only its own call is answered with an error, and the next call on the
// connection is answered, too.
func TestBrokenCallsAreAnswered(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	undisturbed(t, g)
	check := func(stream uint32) []byte { return call(t, stream, agentpb.HealthServiceName, "Check", nil) }
	nonsense := bytes.Repeat([]byte{0xff}, 32)
	for name, c := range map[string]struct {
		sent []byte
		code codes.Code
	}{
		"an oversize frame":        {framed(1, ttrpcframe.TypeRequest, make([]byte, frameMax+1)), codes.ResourceExhausted},
		"an even stream":           {check(2), codes.InvalidArgument},
		"data without a call":      {framed(1, ttrpcframe.TypeData, nonsense), codes.InvalidArgument},
		"a request that is none":   {framed(1, ttrpcframe.TypeRequest, nonsense), codes.InvalidArgument},
		"an empty request":         {framed(1, ttrpcframe.TypeRequest, nil), codes.Unimplemented},
		"a payload that is none":   {call(t, 1, agentpb.AgentServiceName, "CreateContainer", nonsense), codes.InvalidArgument},
		"a payload cut in a field": {call(t, 1, agentpb.AgentServiceName, "ResizeVolume", []byte{0x0a, 0x7f, '/'}), codes.InvalidArgument},
		"no service":               {call(t, 1, "grpc.Nothing", "Check", nil), codes.Unimplemented},
		"no method":                {call(t, 1, agentpb.AgentServiceName, "PauseContainers", nil), codes.Unimplemented},
	} {
		t.Run(name, func(t *testing.T) {
			w := dialWire(t, g)
			w.send(c.sent)
			_, err := w.answer()
			refused(t, err, c.code)
			w.send(check(3))
			if stream, err := w.answer(); stream != 3 || err != nil {
				t.Errorf("the next call on the connection\nwant an answer on stream 3\ngot  one on %d, %v", stream, err)
			}
		})
	}
}

// Data for a call in flight dereferenced a nil pointer in ttrpc's server, and the panic ended PID
// 1.
func TestDataForACallUnderWayIsRefused(t *testing.T) {
	g := guest(t)
	undisturbed(t, g)
	request, err := (&agentpb.CreateContainerRequest{ContainerId: "data", Storages: []*agentpb.Storage{
		{Driver: "blk", Source: nowhere, Fstype: "ext4", MountPoint: "/run/test/data"}}}).Marshal()
	must(t, err)
	w := dialWire(t, g)
	w.send(call(t, 1, agentpb.AgentServiceName, "CreateContainer", request))
	for range 2 {
		w.send(framed(1, ttrpcframe.TypeData, []byte{0x0a, 0}))
		_, err = w.answer()
		refused(t, err, codes.InvalidArgument, "no longer active")
	}
	w.send(call(t, 1, agentpb.HealthServiceName, "Version", nil))
	_, err = w.answer()
	refused(t, err, codes.InvalidArgument, "in progress")
	_, err = w.answer()
	refused(t, err, codes.DeadlineExceeded, nowhere)
}

// ttrpc itself answers calls of missing methods. Clients take the code UNIMPLEMENTED to mean "this
// agent cannot".
func TestMethodsThatAreNotBuiltAreUnimplemented(t *testing.T) {
	g := guest(t)
	w := dialWire(t, g)
	built := rpc.Methods()
	stream, unbuilt := uint32(1), 0
	for _, m := range slices.Concat(agentpb.Methods(), volumepb.Methods()) {
		if slices.Contains(built[m.Service], m.Method) {
			continue
		}
		w.send(call(t, stream, m.Service, m.Method, nil))
		_, err := w.answer()
		refused(t, err, codes.Unimplemented, m.Method)
		stream, unbuilt = stream+2, unbuilt+1
	}
	if unbuilt < 30 {
		t.Errorf("only %d methods are not built: this test no longer knows which", unbuilt)
	}
}

// A caller that gives up while the agent waits for its disk leaves nothing behind.
func TestCallerThatHangsUpLeavesNothing(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	undisturbed(t, g)
	request, err := (&agentpb.CreateContainerRequest{ContainerId: "gone", Storages: []*agentpb.Storage{
		{Driver: "blk", Source: nowhere, Fstype: "ext4", MountPoint: "/run/test/gone"}}}).Marshal()
	must(t, err)
	w := dialWire(t, g)
	w.send(call(t, 1, agentpb.AgentServiceName, "CreateContainer", request))
	w.hangUp()
}

func TestPortThatNobodyListensOnIsRefused(t *testing.T) {
	g := guest(t)
	conn, err := g.Dial(limited(t), 4711)
	if err == nil {
		conn.Close()
		t.Fatal("connected to a port that nobody listens on")
	}
	if errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want it refused\ngot  %v", err)
	}
}
