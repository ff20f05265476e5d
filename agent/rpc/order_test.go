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
	"github.com/directvol/directvol/agent/transport"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/frame"
)

// oneHolder is a table that knows one holder.
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

// wire is a connection to an agent that sends frames as it likes.
type wire struct {
	*testing.T
	net.Conn
	last uint32 // stream
}

func (w *wire) frame(method string, message proto.Message) []byte {
	payload, err := proto.Marshal(message)
	if err != nil {
		w.Fatal(err)
	}
	b, err := proto.Marshal(&ttrpc.Request{Service: agentpb.AgentServiceName, Method: method, Payload: payload})
	if err != nil {
		w.Fatal(err)
	}
	w.last += 2
	return append(frame.Header{Length: uint32(len(b)), StreamID: w.last - 1, Type: frame.TypeRequest}.Append(nil), b...)
}

// exchange sends frames in one piece, and awaits as many answers.
func (w *wire) exchange(frames ...[]byte) {
	var all []byte
	for _, f := range frames {
		all = append(all, f...)
	}
	if _, err := w.Write(all); err != nil {
		w.Fatal(err)
	}
	for range frames {
		head := make([]byte, frame.HeaderBytes)
		if _, err := io.ReadFull(w, head); err != nil {
			w.Fatal(err)
		}
		if _, err := io.CopyN(io.Discard, w, int64(frame.ParseHeader(head).Length)); err != nil {
			w.Fatal(err)
		}
	}
}

// A host gives a call up and makes its opposite, and the guest reads both at once.
func TestLaterCallOfAContainerWins(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(2, runtime.GOMAXPROCS(0))))
	a := newAgent()
	held := new(atomic.Bool)
	a.Sandbox = sandbox.New(a.Log, oneHolder{held: held})
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := transport.Listen(address.Address{Scheme: address.Unix, Path: path}, a.Quick, &a.Order, a.Log)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	a.Register(server)
	go func() { _ = server.Serve(context.Background(), l) }()
	defer server.Close()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	w := &wire{T: t, Conn: conn}
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
