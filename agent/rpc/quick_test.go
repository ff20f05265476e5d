package rpc

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// BenchmarkQuick answers statistics of a tmpfs, with one system call each.
func BenchmarkQuick(b *testing.B) {
	const memory = "/dev/shm" // as in shm_overview(7)
	a := newAgent()
	if _, err := a.Volumes.Stats(b.Context(), memory); err != nil {
		b.Skipf("mount a tmpfs at %s to run this: %v", memory, err)
	}
	payload, err := (&agentpb.VolumeStatsRequest{VolumeGuestPath: memory}).Marshal()
	if err != nil {
		b.Fatal(err)
	}
	r := &ttrpcframe.Request{Payload: payload}
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := a.quickStats(r); !ok {
			b.Fatal("left to the service")
		}
	}
}

// A growth is answered in place if its disk has already grown. The service handles all other
// growths: those that must wait, are refused, or have little time.
func TestQuickGrowsAVolumeThatCanGrowAtOnce(t *testing.T) {
	dir := mounttest.Dir(t)
	image := mounttest.Image(t, "xfs")
	disk := mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	a := newAgent()
	if _, err := a.Volumes.Stats(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	const larger = 400 << 20
	grow := func(size uint64, timeout time.Duration) bool {
		payload, err := (&agentpb.ResizeVolumeRequest{VolumeGuestPath: dir, Size_: size}).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		response, ok := a.quickResize(&ttrpcframe.Request{Payload: payload, TimeoutNano: int64(timeout)})
		if len(response) > 0 {
			t.Errorf("want an empty answer\ngot  % x", response)
		}
		return ok
	}
	if grow(larger, 0) {
		t.Error("to a size that the disk has not")
	}
	if err := os.Truncate(image, larger); err != nil {
		t.Fatal(err)
	}
	mounttest.Run(t, "losetup", "-c", disk)
	if grow(larger, leastGrowthTimeout-1) {
		t.Error("in a time that is too short")
	}
	for began := time.Now(); !grow(larger, leastGrowthTimeout); { // until the watch only waits, and the machine is fast enough
		if err := t.Context().Err(); err != nil {
			t.Fatalf("not in %v: %v", time.Since(began), err)
		}
	}
}

// A btrfs has no number of inodes. An answer with zero of them would say that it is full.
func TestStatsOfABtrfsLeaveOutItsInodes(t *testing.T) {
	for fstype, want := range map[string][]agentpb.VolumeUsage_Unit{
		"btrfs": {agentpb.VolumeUsage_BYTES}, "xfs": {agentpb.VolumeUsage_BYTES, agentpb.VolumeUsage_INODES},
	} {
		dir := mounttest.Dir(t)
		mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, fstype)), dir, fstype, 0, "")
		a := newAgent()
		request := &agentpb.VolumeStatsRequest{VolumeGuestPath: dir}
		ordinary, err := a.getVolumeStats(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		payload, err := request.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		bytes, ok := a.quickStats(&ttrpcframe.Request{Payload: payload})
		var quick agentpb.VolumeStatsResponse
		if err := quick.Unmarshal(bytes); err != nil || !ok {
			t.Fatalf("not answered at once: %v, error %v", ok, err)
		}
		for way, response := range map[string]*agentpb.VolumeStatsResponse{"ordinary": ordinary, "quick": &quick} {
			var got []agentpb.VolumeUsage_Unit
			for _, u := range response.Usage {
				if got = append(got, u.Unit); u.Total == 0 {
					t.Errorf("%s, %s: a total of 0 %v", fstype, way, u.Unit)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s, %s\nwant %v\ngot  %v", fstype, way, want, got)
			}
		}
		a.Volumes.Forget(dir)
	}
}
