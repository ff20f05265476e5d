package ways

import (
	"context"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/frame"
	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tests/vm"
)

// cidLocal is vsock's loopback (VMADDR_CID_LOCAL of linux/vm_sockets.h).
const cidLocal = 1

// agentPort is where the agent listens.
const agentPort = 1024

// dial reaches a vsock port of the guest.
func dial(ctx context.Context, g *vm.Guest, port uint32) (net.Conn, error) {
	to, err := address.Parse(g.VM().GuestAddress(port))
	if err != nil {
		return nil, err
	}
	return to.Dial(ctx)
}

// checkCall is a whole ttrpc call of Health.Check, as it goes over the wire.
func checkCall(t *testing.T) []byte {
	t.Helper()
	payload, err := proto.Marshal(&ttrpc.Request{Service: agentpb.HealthServiceName, Method: "Check"})
	must(t, err)
	return append(frame.Header{Length: uint32(len(payload)), StreamID: 1, Type: frame.TypeRequest}.Append(nil), payload...)
}

func TestPeerInsideTheGuestIsRefusedAndTheHostIsNot(t *testing.T) {
	g := guest(t)
	call := checkCall(t)
	host, err := dial(limited(t), g, agentPort)
	must(t, err)
	defer host.Close()
	for _, cid := range []uint32{cidLocal, act.OwnCID} {
		// The way is open: another program of the guest answers over it.
		echo, err := g.Act.DialVsock(limited(t), act.DialVsock{CID: cid, Port: act.EchoPort, Send: call, Await: len(call)})
		must(t, err)
		if string(echo.Data) != string(call) {
			t.Fatalf("the echo over CID %d\nwant %x\ngot  %x", cid, call, echo.Data)
		}
		// The agent closes it, and answers nothing.
		got, err := g.Act.DialVsock(limited(t), act.DialVsock{CID: cid, Port: agentPort, Send: call, Await: 1})
		must(t, err)
		if len(got.Data) != 0 {
			t.Errorf("the agent's answer over CID %d\nwant none\ngot  %x", cid, got.Data)
		}
	}
	// What the host had open is, and what it opens is answered.
	_, err = host.Write(call)
	must(t, err)
	if _, err := host.Read(make([]byte, 1)); err != nil {
		t.Errorf("the host's connection from before: %v", err)
	}
	must(t, g.Agent().Check(limited(t)))
}

func TestKernelsVsockReachesTheAgentByItsCID(t *testing.T) {
	const device = "/dev/vhost-vsock"
	if f, err := os.OpenFile(device, os.O_RDWR, 0); err != nil {
		t.Skipf("the host's kernel offers no vsock for guests: %v (try: modprobe vhost_vsock, as one who may open %s, then go test -run %s ./tests/ways)", err, device, t.Name())
	} else {
		f.Close()
	}
	g := guest(t)
	if got, want := g.VM().AgentAddress(), "vsock://"; !strings.HasPrefix(got, want) {
		t.Errorf("the agent is at\nwant %s…\ngot  %s", want, got)
	}
	must(t, g.Agent().Check(limited(t)))
	if _, err := dial(limited(t), g, 9); err == nil || !strings.Contains(err.Error(), g.VM().GuestAddress(9)) {
		t.Errorf("a port that nobody listens on\nwant an error with %s\ngot  %v", g.VM().GuestAddress(9), err)
	}
}
