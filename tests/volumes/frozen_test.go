package volumes

import (
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/vm"
)

// A lease freezes a volume of each type. A growth is refused with the steps meanwhile, and goes on
// afterwards, and so does the writer.
func TestFrozenVolumeGrowsAfterItsLease(t *testing.T) { everyFilesystem(t, growsAfterItsLease) }

func growsAfterItsLease(t *testing.T, g *vm.Guest, fstype string) {
	v := mounted(t, g, fstype)
	isHealthy(t, v)
	goal := disks[fstype] + 64*miB
	must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
	writer := written(t, v, 0)
	client := ttrpc.NewClient(dialPort(t, g, agentpb.Port))
	defer client.Close()
	request := &volumepb.FreezeVolumesRequest{VolumeGuestPaths: []string{v.GuestPath}, LeaseMilliseconds: 60_000}
	leases := 0
	for lease, err := range service.Receive[volumepb.FreezeVolumesResponse](within(t, jobLimit), client, volumepb.VolumeServiceName, "FreezeVolumes", request) {
		must(t, err)
		leases++
		if len(lease.Volumes) != 1 || lease.Volumes[0].Consistency != volumepb.FrozenVolume_FROZEN {
			t.Errorf("want one frozen volume\ngot  %v", lease)
		}
		refused(t, resize(t, g, v, goal), codes.FailedPrecondition, v.GuestPath, "ThawVolumes")
		_, err := service.Call[emptypb.Empty](limited(t), client, volumepb.VolumeServiceName, "ThawVolumes", &volumepb.ThawVolumesRequest{Lease: lease.Lease})
		must(t, err)
	}
	if leases != 1 {
		t.Errorf("want one lease\ngot  %d", leases)
	}
	must(t, resize(t, g, v, goal))
	must(t, writer.Await(within(t, jobLimit), writer.Ledger().Bytes()+4*miB)) // more than may be on its way
	must(t, writer.Stop(limited(t)))
	freshlyVerified(t, v, writer.Ledger().Bytes())
}
