package rpc

import (
	"testing"

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
