package rpc

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/frame"
)

// BenchmarkQuick answers statistics of a tmpfs, one system call each.
func BenchmarkQuick(b *testing.B) {
	const memory = "/dev/shm" // as shm_overview(7) has it
	a := newAgent()
	if _, err := a.Volumes.Stats(b.Context(), memory); err != nil {
		b.Skipf("mount a tmpfs at %s to run this: %v", memory, err)
	}
	payload, err := (&agentpb.VolumeStatsRequest{VolumeGuestPath: memory}).Marshal()
	if err != nil {
		b.Fatal(err)
	}
	r := &frame.Request{Service: []byte(agentpb.AgentServiceName), Method: []byte("GetVolumeStats"), Payload: payload}
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := a.Quick(r); !ok {
			b.Fatal("left to the service")
		}
	}
}

// A growth is answered where it is read when its disk has grown, and counted once. The
// service has all others: what has to wait, what is refused, and what has little time.
func TestQuickGrowsWhatCanGrowAtOnce(t *testing.T) {
	dir := mounttest.Dir(t)
	image := mounttest.Image(t, "xfs")
	disk := mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	a := newAgent()
	ready := make(chan struct{})
	a.Ready = ready
	if _, err := a.Volumes.Stats(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	const larger = 400 << 20
	grow := func(size uint64, timeout time.Duration) bool {
		payload, err := (&agentpb.ResizeVolumeRequest{VolumeGuestPath: dir, Size_: size}).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		response, ok := a.Quick(&frame.Request{Service: []byte(agentpb.AgentServiceName), Method: []byte("ResizeVolume"), Payload: payload, TimeoutNano: int64(timeout)})
		if len(response) > 0 {
			t.Errorf("want an empty answer\ngot  % x", response)
		}
		return ok
	}
	if grow(0, 0) {
		t.Error("before the guest is ready")
	}
	close(ready)
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
	for began := time.Now(); !grow(larger, leastGrowthTimeout); { // when the watch only waits, and the machine is fast enough
		if err := t.Context().Err(); err != nil {
			t.Fatalf("not in %v: %v", time.Since(began), err)
		}
	}
	var text metrics.Text
	a.counts.Write(&text)
	if want := `directvol_agent_calls_total{method="ResizeVolume",code="OK"} 1`; !strings.Contains(text.String(), want) {
		t.Errorf("want %s\ngot  %s", want, text.String())
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	a.calls.RLock() // a call that goes on
	a.Drain(over)
	for a.calls.TryRLock() {
		a.calls.RUnlock()
	}
	if grow(larger, 0) {
		t.Error("of an agent that is ending")
	}
	a.calls.RUnlock()
}
