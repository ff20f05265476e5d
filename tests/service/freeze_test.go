package service

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// longLease is longer than goesOn waits for the thaw; shortLease ends while a test waits. thawLimit
// is a base for vm.Limit.
const (
	longLease  = 10 * time.Minute // the longest that there is
	shortLease = 2 * time.Second
	thawLimit  = time.Minute
)

// frozen is a lease of a volume that is being written to.
type frozen struct {
	*vm.Volume
	guest  *vm.Guest
	writer *remote.Writer
	client *ttrpc.Client
	name   string
	ended  chan error // of the stream
}

func TestVolumeIsThawedWhoeverDies(t *testing.T) { isThawedWhoeverDies(t, shared.Guest(t), "ext4") }

func isThawedWhoeverDies(t *testing.T, g *vm.Guest, fstype string) {
	s := daemon{g, remote.Agent}
	t.Run("the client", func(t *testing.T) {
		f := frozenUnderAWriter(t, g, fstype, "client", longLease)
		f.client.Close() // as the kernel does for a process that was killed
		f.goesOn(t)
	})
	t.Run("the agent", func(t *testing.T) {
		f := frozenUnderAWriter(t, g, fstype, "agent", longLease)
		restart(t, s, syscall.SIGKILL)
		f.goesOn(t)
	})
	t.Run("the agent, in order", func(t *testing.T) {
		f := frozenUnderAWriter(t, g, fstype, "in-order", longLease)
		restart(t, s, syscall.SIGTERM)
		f.goesOn(t)
	})
	t.Run("nobody", func(t *testing.T) {
		f := frozenUnderAWriter(t, g, fstype, "nobody", longLease)
		request := &volumepb.ThawVolumesRequest{Lease: f.name}
		_, err := service.Call[emptypb.Empty](vmtest.Limited(t), dialAgent(t, g), volumepb.VolumeServiceName, "ThawVolumes", request)
		vmtest.Must(t, err)
		if err := <-f.ended; err != nil {
			t.Errorf("the lease was ended by ThawVolumes, but its stream reports %v", err)
		}
		f.goesOn(t)
	})
	t.Run("nobody, and the container is removed", func(t *testing.T) {
		f := frozenUnderAWriter(t, g, fstype, "removed", longLease)
		err := f.Unmount(vmtest.Limited(t))
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "in use") {
			t.Errorf("remove the container of a writer\nwant FAILED_PRECONDITION\ngot  %v", err)
		}
		if err := <-f.ended; status.Code(err) != codes.Aborted {
			t.Errorf("the stream of a lease whose volume is to be unmounted\nwant ABORTED\ngot  %v", err)
		}
		f.goesOn(t)
	})
	t.Run("the disk, for a while", func(t *testing.T) {
		f := frozenUnderAWriter(t, g, fstype, "disk", shortLease)
		vmtest.Must(t, f.Hang(vmtest.Limited(t)))
		if err := <-f.ended; status.Code(err) != codes.Aborted {
			t.Errorf("the stream after its lease\nwant ABORTED\ngot  %v", err)
		}
		vmtest.Must(t, f.Answer())
		f.goesOn(t)
	})
	t.Run("the disk, before it is frozen", func(t *testing.T) { freezesNoDiskThatHangs(t, g, fstype) })
}

// freezesNoDiskThatHangs calls FreezeVolumes while a write is stuck.
func freezesNoDiskThatHangs(t *testing.T, g *vm.Guest, fstype string) {
	v := newVolume(t, g, "hangs-"+fstype, fstype)
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	_, err := v.LookedStats(vmtest.Limited(t))
	vmtest.Must(t, err)
	w, err := v.StartWriter(vmtest.Within(t, vmtest.JobLimit), 0)
	vmtest.Must(t, err)
	vmtest.Must(t, w.Await(vmtest.Within(t, vmtest.JobLimit), miB))
	vmtest.Must(t, v.Hang(vmtest.Limited(t)))
	for _, err := range freeze(vmtest.Within(t, vmtest.JobLimit), dialAgent(t, g), v, longLease) {
		if status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), v.GuestPath) {
			t.Errorf("freeze a disk that hangs\nwant DEADLINE_EXCEEDED and the volume\ngot  %v", err)
		}
	}
	vmtest.Must(t, v.Answer())
	(&frozen{Volume: v, guest: g, writer: w}).goesOn(t)
}

// The guest cannot be asked without the backend. The superblock on the disk shows when it is
// thawed.
func TestVolumeIsThawedWithoutAVsockBackend(t *testing.T) {
	g := vmtest.Boot(t, vm.Options{Append: remote.AsService})
	f := frozenUnderAWriter(t, g, "ext4", "backend", 10*shortLease)
	if isFrozen, err := frozenOnDisk(f.Path); err != nil || !isFrozen {
		t.Fatalf("its superblock does not show that it is frozen, error %v", err)
	}
	all, err := vm.ProcessesWith(g.Dir)
	vmtest.Must(t, err)
	killed := false
	for _, p := range all {
		if p.IsBackend() {
			vmtest.Must(t, syscall.Kill(p.ID, syscall.SIGKILL))
			killed = true
		}
	}
	if !killed {
		t.Skip("this host's kernel carries vsock: a host without /dev/vhost-vsock has a backend")
	}
	vmtest.Must(t, vm.Again(vmtest.Within(t, vmtest.JobLimit), func() (bool, error) {
		isFrozen, err := frozenOnDisk(f.Path)
		return !isFrozen, err
	}))
	ledger := f.writer.Ledger()
	g.Kill()
	next := shared.Guest(t)
	v := next.Take(f.Volume.Volume)
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	if _, err := next.Remote.Verify(vmtest.Within(t, vmtest.JobLimit), v.GuestPath+"/written-0", ledger, nil); err != nil {
		t.Error(err)
	}
	vmtest.Detach(t, v)
	vmtest.Must(t, g.Close())
}

// frozenOnDisk reports whether an ext4 is frozen: FIFREEZE removes the mark that the log must be
// replayed from the superblock (needs_recovery, fs/ext4/ext4.h), and FITHAW writes it again.
func frozenOnDisk(image string) (bool, error) {
	const offset, needsRecovery = 1024 + 0x60, 4
	file, err := os.Open(image)
	if err != nil {
		return false, err
	}
	defer file.Close()
	var incompatible [4]byte
	if _, err := file.ReadAt(incompatible[:], offset); err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint32(incompatible[:])&needsRecovery == 0, nil
}

func dialAgent(t *testing.T, g *vm.Guest) *ttrpc.Client {
	t.Helper()
	conn, err := g.Dial(vmtest.Limited(t), agentpb.Port)
	vmtest.Must(t, err)
	client := ttrpc.NewClient(conn)
	t.Cleanup(func() { client.Close() })
	return client
}

func freeze(ctx context.Context, client *ttrpc.Client, v *vm.Volume, length time.Duration) func(func(*volumepb.FreezeVolumesResponse, error) bool) {
	request := &volumepb.FreezeVolumesRequest{VolumeGuestPaths: []string{v.GuestPath}, LeaseMilliseconds: uint32(length.Milliseconds())}
	return service.Receive[volumepb.FreezeVolumesResponse](ctx, client, volumepb.VolumeServiceName, "FreezeVolumes", request)
}

// frozenUnderAWriter makes a volume with a writer, and freezes it.
func frozenUnderAWriter(t *testing.T, g *vm.Guest, fstype, id string, length time.Duration) *frozen {
	t.Helper()
	f := &frozen{Volume: newVolume(t, g, "frozen-"+id+"-"+fstype, fstype), guest: g, client: dialAgent(t, g), ended: make(chan error, 1)}
	vmtest.Must(t, f.Mount(vmtest.Limited(t)))
	_, err := f.LookedStats(vmtest.Limited(t))
	vmtest.Must(t, err)
	f.writer, err = f.StartWriter(vmtest.Within(t, 2*vmtest.JobLimit), 0)
	vmtest.Must(t, err)
	vmtest.Must(t, f.writer.Await(vmtest.Within(t, vmtest.JobLimit), miB))
	answered := make(chan error, 1)
	ctx := vmtest.Within(t, 2*vmtest.JobLimit)
	go func() {
		var ended error
		for response, err := range freeze(ctx, f.client, f.Volume, length) {
			if ended = err; err != nil {
				break
			}
			if len(response.Volumes) != 1 || response.Volumes[0].Consistency != volumepb.FrozenVolume_FROZEN {
				err = fmt.Errorf("want one frozen volume, got %v", response)
			}
			f.name = response.Lease
			answered <- err
		}
		f.ended <- ended
	}()
	select {
	case err := <-answered:
		vmtest.Must(t, err)
	case err := <-f.ended:
		t.Fatalf("not frozen: %v", err)
	}
	return f
}

// goesOn checks that the writer goes on before the end of a long lease, and that nothing it has
// written is lost.
func (f *frozen) goesOn(t *testing.T) {
	t.Helper()
	vmtest.Must(t, f.writer.Await(vmtest.Within(t, thawLimit), f.writer.Ledger().Bytes()+4*miB)) // more than may be on its way
	ctx := vmtest.Within(t, vmtest.JobLimit)
	vmtest.Must(t, f.writer.Stop(ctx))
	if _, err := f.Verify(ctx, nil); err != nil {
		t.Error(err)
	}
	vmtest.Detach(t, f.Volume)
}
