package service

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// An agent with a bug in one call answers this call with INTERNAL and continues. It runs in the
// guest next to the service.
func TestPanicInOneCallHarmsNoOther(t *testing.T) {
	g := shared.Guest(t)
	v := newVolume(t, g, "panic", "ext4")
	vmtest.Must(t, g.Attach(vmtest.Limited(t), v.Volume))
	disk, _ := g.VM().Disk(v.DiskID())
	const path = "/run/panic"
	v.GuestPath = path

	ctx, end := context.WithCancel(vmtest.Within(t, vmtest.JobLimit))
	defer end()
	exit := make(chan remote.Exit, 1)
	go func() {
		e, _ := g.Remote.Exec(ctx, remote.Command{Argv: []string{"/test-guest", remote.FaultyAgent}})
		exit <- e
	}()
	to, err := address.Parse(g.VM().GuestAddress(remote.FaultyAgentPort))
	vmtest.Must(t, err)
	agent := agentclient.New(to, agentclient.Config{Vsock: g.VM()})
	defer agent.Close()
	vmtest.Must(t, agent.Check(vmtest.Limited(t)))
	vmtest.Must(t, agent.CreateContainer(vmtest.Limited(t), &agentpb.CreateContainerRequest{ContainerId: "cc", Storages: []*agentpb.Storage{
		{Driver: "blk", Source: disk.PCIPath, Fstype: "ext4", MountPoint: path},
	}}))
	w, err := v.StartWriter(vmtest.Within(t, vmtest.JobLimit), 0)
	vmtest.Must(t, err)
	vmtest.Must(t, w.Await(vmtest.Within(t, vmtest.JobLimit), miB))
	for range 3 {
		_, err := agent.GetVolumeStats(vmtest.Limited(t), path)
		if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "GetVolumeStats: the agent has a bug") {
			t.Fatalf("want INTERNAL, and the call named\ngot  %v", err)
		}
		vmtest.Must(t, agent.Check(vmtest.Limited(t)))
		vmtest.Must(t, w.Await(vmtest.Within(t, vmtest.JobLimit), w.Ledger().Bytes()+miB))
	}
	vmtest.Must(t, w.Stop(vmtest.Limited(t)))
	if _, err := v.Verify(vmtest.Within(t, vmtest.JobLimit), nil); err != nil {
		t.Error(err)
	}
	vmtest.Must(t, agent.RemoveContainer(vmtest.Limited(t), "cc"))
	if vmtest.IsMounted(t, g, path) {
		t.Error("it is still mounted")
	}
	select {
	case e := <-exit:
		t.Errorf("the agent has ended: %+v", e)
	default:
	}
	vmtest.Detach(t, v)
}
