package rpc

import (
	"context"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/server"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// oneHolder is a table with at most one holder.
type oneHolder struct {
	sandbox.Storages
	held *atomic.Bool
}

func (o oneHolder) Hold(_ context.Context, _ string, _ []*agentpb.Storage, agreed func() bool) error {
	if agreed() {
		o.held.Store(true)
	}
	return nil
}

func (o oneHolder) Release(context.Context, string) error {
	o.held.Store(false)
	return nil
}

func (oneHolder) AwaitDevices(context.Context, []*agentpb.Device) error { return nil }

// wire is a connection to an agent on which a test sends any frames.
type wire struct {
	*testing.T
	net.Conn
	last uint32 // the last stream
}

// dial serves an agent's calls until the test ends, and connects to it.
func dial(t *testing.T, a *Agent) *wire {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.sock")
	agent := &server.Server{Log: a.Log, Counts: a.Counts}
	if err := agent.Listen(address.Address{Scheme: address.Unix, Path: path}, a.Calls()); err != nil {
		t.Fatal(err)
	}
	go func() { _ = agent.Serve() }()
	t.Cleanup(func() { agent.Close() })
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &wire{T: t, Conn: conn}
}

func (w *wire) frame(method string, message proto.Message) []byte {
	payload, err := proto.Marshal(message)
	if err != nil {
		w.Fatal(err)
	}
	return w.request(&ttrpc.Request{Service: agentpb.AgentServiceName, Method: method, Payload: payload})
}

func (w *wire) request(r *ttrpc.Request) []byte {
	b, err := proto.Marshal(r)
	if err != nil {
		w.Fatal(err)
	}
	w.last += 2
	return append(ttrpcframe.Header{Length: uint32(len(b)), StreamID: w.last - 1, Type: ttrpcframe.TypeRequest}.Append(nil), b...)
}

// exchange sends frames in one write, and waits for as many answers. It returns the last one.
func (w *wire) exchange(frames ...[]byte) (answer *ttrpc.Response) {
	var all []byte
	for _, f := range frames {
		all = append(all, f...)
	}
	if _, err := w.Write(all); err != nil {
		w.Fatal(err)
	}
	for range frames {
		head := make([]byte, ttrpcframe.HeaderBytes)
		if _, err := io.ReadFull(w, head); err != nil {
			w.Fatal(err)
		}
		body := make([]byte, ttrpcframe.ParseHeader(head).Length)
		if _, err := io.ReadFull(w, body); err != nil {
			w.Fatal(err)
		}
		answer = new(ttrpc.Response)
		if err := proto.Unmarshal(body, answer); err != nil {
			w.Fatal(err)
		}
	}
	return answer
}

// A host gives up a call and makes the opposite call, and the guest reads both at once.
func TestLaterCallOfAContainerWins(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(2, runtime.GOMAXPROCS(0))))
	a := newAgent()
	held := new(atomic.Bool)
	a.Sandbox = sandbox.New(a.Log, oneHolder{held: held})
	w := dial(t, a)
	create := func() []byte {
		return w.frame("CreateContainer", &agentpb.CreateContainerRequest{ContainerId: "volume-dv"})
	}
	remove := func() []byte {
		return w.frame("RemoveContainer", &agentpb.RemoveContainerRequest{ContainerId: "volume-dv"})
	}
	stayed, vanished := 0, 0
	for range 500 {
		w.exchange(create(), remove())
		if held.Load() {
			stayed++
		}
		w.exchange(create())
		w.exchange(remove(), create())
		if !held.Load() {
			vanished++
		}
	}
	if stayed+vanished > 0 {
		t.Errorf("of 500 rounds each\nwant none held after create and remove, and none not held after remove and create\ngot  %d and %d", stayed, vanished)
	}
}
