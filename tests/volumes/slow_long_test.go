//go:build long

package volumes

import (
	"slices"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
)

// A watcher that takes one event of eight loses some when every buffer on the way and the agent's
// queue are full: it gets a mark and all volumes again, and what it knows then is true. The
// volume's path is long, so that few events fill the buffers.
func TestSlowWatcherOverVsockIsResynced(t *testing.T) {
	const (
		rounds    = 75 // of eight events: twice what the buffers and the queue take
		leases    = 4  // in a round; each makes two events
		component = 240
	)
	g := guest(t)
	_, storage := attached(t, g, "ext4")
	for range 14 {
		storage.MountPoint += "/" + strings.Repeat("x", component)
	}
	must(t, container(t, g, "slow", storage))
	defer func() { remove(t, g, "slow") }()
	next := make(chan *volumepb.VolumeEvent)
	ended := make(chan error, 1)
	watching, ctx := client(t, g), within(t, jobLimit)
	go func() {
		defer close(next)
		for event, err := range watching.WatchVolumes(ctx) {
			if err != nil {
				ended <- err
				return
			}
			select {
			case next <- event:
			case <-ctx.Done():
				return
			}
		}
	}()
	take := func() *volumepb.VolumeEvent {
		event, ok := <-next
		if !ok {
			t.Fatalf("the watch has ended: %v", <-ended)
		}
		return event
	}
	until := func(kind volumepb.VolumeEvent_Type) (events []*volumepb.VolumeEvent) {
		for e := take(); e.Type != kind; e = take() {
			events = append(events, e)
		}
		return events
	}
	until(volumepb.VolumeEvent_RESYNCED)

	c := ttrpc.NewClient(dialPort(t, g, agentpb.Port))
	defer c.Close()
	request := &volumepb.FreezeVolumesRequest{VolumeGuestPaths: []string{storage.MountPoint}, LeaseMilliseconds: 60_000}
	for range rounds {
		for range leases {
			for lease, err := range service.Receive[volumepb.FreezeVolumesResponse](within(t, jobLimit), c, volumepb.VolumeServiceName, "FreezeVolumes", request) {
				must(t, err)
				_, err := service.Call[emptypb.Empty](limited(t), c, volumepb.VolumeServiceName, "ThawVolumes", &volumepb.ThawVolumesRequest{Lease: lease.Lease})
				must(t, err)
			}
		}
		if e := take(); e.Type == volumepb.VolumeEvent_RESYNC {
			t.Fatal("it lost events that were not many")
		}
	}
	before := until(volumepb.VolumeEvent_RESYNC)
	t.Logf("of %d events it had %d before the mark", 2*leases*rounds, rounds+len(before))
	if rounds+len(before) >= 2*leases*rounds {
		t.Errorf("want fewer events than there were\ngot  %d", len(before))
	}
	again := until(volumepb.VolumeEvent_RESYNCED)
	if !slices.ContainsFunc(again, func(e *volumepb.VolumeEvent) bool {
		return e.Type == volumepb.VolumeEvent_ADDED && e.Volume.VolumeGuestPath == storage.MountPoint && !e.Volume.Frozen
	}) {
		t.Errorf("after the mark\nwant the volume, not frozen\ngot  %v", again)
	}
}
