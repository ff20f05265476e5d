package main

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
)

// lender serves FreezeVolumes, whose lease lasts until hold returns, and Check, which calls check.
// ended gets a value at a lease's end.
func lender(t *testing.T, hold func(context.Context) error, check func()) (server string, ended chan struct{}) {
	t.Helper()
	s, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	ended = make(chan struct{}, 1)
	s.RegisterService(volumepb.VolumeServiceName, &ttrpc.ServiceDesc{Streams: map[string]ttrpc.Stream{
		"FreezeVolumes": service.Stream(func(ctx context.Context, _ *volumepb.FreezeVolumesRequest, send func(*volumepb.FreezeVolumesResponse) error) error {
			defer func() { ended <- struct{}{} }()
			if err := send(&volumepb.FreezeVolumesResponse{Lease: "1"}); err != nil {
				return err
			}
			return hold(ctx)
		}),
	}})
	s.RegisterService(agentpb.HealthServiceName, &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"Check": service.Method(func(context.Context, *agentpb.CheckRequest) (*agentpb.HealthCheckResponse, error) {
			check()
			return &agentpb.HealthCheckResponse{}, nil
		}),
	}})
	path := filepath.Join(t.TempDir(), "s")
	go s.Serve(context.Background(), listen(t, path))
	t.Cleanup(func() { s.Close() })
	return "unix://" + path, ended
}

const freeze = `FreezeVolumes json://{"volume_guest_paths":["/v"],"lease_milliseconds":600000}`

// untilLeft holds a lease as the agent does: until its caller's connection ends.
func untilLeft(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// The agent learns of the end of a stream only by the end of its connection. Volumes would stay
// frozen until the lease's end while the run goes on.
func TestFreezeThatIsGivenUpEndsBeforeTheNextCall(t *testing.T) {
	thawed := make(chan struct{})
	server, ended := lender(t, untilLeft, func() { <-thawed })
	go func() { <-ended; close(thawed) }()
	got, timeout := limited(t, server, "--ignore-errors", "-c", freeze, "-c", "Check")
	if want := "FreezeVolumes\n  lease: 1\nCheck\n  status: UNKNOWN\n"; got.Exit != program.Failed || got.Stdout != want {
		t.Errorf("want exit 1, and a Check after the thaw\ngot  %+v", got)
	}
	if want := "FreezeVolumes: DEADLINE_EXCEEDED: no end of the answers within " + timeout.String(); !strings.HasPrefix(got.Stderr, want) {
		t.Errorf("want %s, as it was answered\ngot  %s", want, got.Stderr)
	}
}

func TestFreezeEndsByAThawOrByCtrlC(t *testing.T) {
	server, _ := lender(t, func(context.Context) error { return nil }, nil)
	got := ctl(t.Context(), "connect", "--server-address", server, "--json", "-c", freeze)
	same(t, "thawed: exit", program.OK, got.Exit)
	same(t, "thawed: output", `{"method":"FreezeVolumes","response":{"lease":"1","volumes":[]}}`+"\n", got.Stdout)

	ctx, ctrlC := context.WithCancel(t.Context())
	server, ended := lender(t, func(ctx context.Context) error { ctrlC(); return untilLeft(ctx) }, nil)
	got = ctl(ctx, "connect", "--server-address", server, "--timeout", "0", "-c", freeze)
	same(t, "Ctrl-C: exit", program.Interrupted, got.Exit)
	<-ended
}
