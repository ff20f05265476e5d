package vsock

import (
	"os"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// checkCall returns a whole ttrpc call of Health.Check, as on the wire.
func checkCall(t *testing.T) []byte {
	t.Helper()
	payload, err := proto.Marshal(&ttrpc.Request{Service: agentpb.HealthServiceName, Method: "Check"})
	vmtest.Must(t, err)
	return append(ttrpcframe.Header{Length: uint32(len(payload)), StreamID: 1, Type: ttrpcframe.TypeRequest}.Append(nil), payload...)
}

func TestPeerInsideTheGuestIsRefusedAndTheHostIsNot(t *testing.T) {
	g := shared.Guest(t)
	call := checkCall(t)
	host, err := g.Dial(vmtest.Limited(t), agentpb.Port)
	vmtest.Must(t, err)
	defer host.Close()
	for _, cid := range []uint32{unix.VMADDR_CID_LOCAL, remote.OwnCID} {
		// The way is open: another program of the guest answers on it.
		echo, err := g.Remote.DialVsock(vmtest.Limited(t), remote.DialVsock{CID: cid, Port: remote.EchoPort, Send: call, Await: len(call)})
		vmtest.Must(t, err)
		if string(echo.Data) != string(call) {
			t.Fatalf("the echo over CID %d\nwant %x\ngot  %x", cid, call, echo.Data)
		}
		// The agent closes the connection without an answer.
		got, err := g.Remote.DialVsock(vmtest.Limited(t), remote.DialVsock{CID: cid, Port: agentpb.Port, Send: call, Await: 1})
		vmtest.Must(t, err)
		if len(got.Data) != 0 {
			t.Errorf("the agent's answer over CID %d\nwant none\ngot  %x", cid, got.Data)
		}
	}
	// The host's open connection still works, and a new connection is answered.
	_, err = host.Write(call)
	vmtest.Must(t, err)
	if _, err := host.Read(make([]byte, 1)); err != nil {
		t.Errorf("the host's connection from before: %v", err)
	}
	vmtest.Must(t, g.Agent().Check(vmtest.Limited(t)))
}

func TestKernelsVsockReachesTheAgentByItsCID(t *testing.T) {
	const device = "/dev/vhost-vsock"
	if f, err := os.OpenFile(device, os.O_RDWR, 0); err != nil {
		t.Skipf("the host's kernel has no vsock for guests: %v (try: modprobe vhost_vsock, then, as a user who may open %s, go test -run %s ./tests/vsock)", err, device, t.Name())
	} else {
		f.Close()
	}
	g := shared.Guest(t)
	if got, want := g.VM().AgentAddress(), "vsock://"; !strings.HasPrefix(got, want) {
		t.Errorf("the agent is at\nwant %s…\ngot  %s", want, got)
	}
	vmtest.Must(t, g.Agent().Check(vmtest.Limited(t)))
	if _, err := g.Dial(vmtest.Limited(t), 9); err == nil || !strings.Contains(err.Error(), g.VM().GuestAddress(9)) {
		t.Errorf("a port that nobody listens on\nwant an error with %s\ngot  %v", g.VM().GuestAddress(9), err)
	}
}
