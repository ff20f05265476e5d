package sandbox_test

import (
	"context"
	"errors"
	"reflect"
	"testing"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
)

// rawAgent keeps the requests that a volume without a mount is about.
type rawAgent struct {
	agent
	created *agentpb.CreateContainerRequest
	calls   []string
}

func (a *rawAgent) CreateContainer(_ context.Context, r *agentpb.CreateContainerRequest) error {
	a.created = r
	return nil
}

func (a *rawAgent) GetVolumeStats(_ context.Context, path string) (*agentpb.VolumeStatsResponse, error) {
	a.calls = append(a.calls, "stats "+path)
	return &agentpb.VolumeStatsResponse{}, nil
}

func (a *rawAgent) CheckResizeVolume(_ context.Context, path string, _ uint64) error {
	a.calls = append(a.calls, "check "+path)
	return nil
}

func (a *rawAgent) ResizeVolume(_ context.Context, path string, _ uint64) error {
	a.calls = append(a.calls, "resize "+path)
	return nil
}

// A volume without a filesystem is a device of its container, by its place and its serial, and
// every call names it by that serial.
func TestVolumeWithoutAFilesystemIsADevice(t *testing.T) {
	w := newWorld()
	a := &rawAgent{agent: agent{w}}
	s := sandbox.New(machine{w}, a, fine)
	v := sandbox.Volume{ID: "data", Path: "/stores/data"}
	if err := s.Attach(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	want := "/dev/disk/by-id/virtio-" + v.DiskID()
	path, err := s.Mount(t.Context(), v.ID)
	if err != nil || path != want {
		t.Errorf("\nwant %s\ngot  %s, error %v", want, path, err)
	}
	wantRequest := &agentpb.CreateContainerRequest{ContainerId: sandbox.Holder(v.ID), Devices: []*agentpb.Device{{Type: "blk", Id: "02/01", VmPath: want}}}
	if !reflect.DeepEqual(a.created, wantRequest) {
		t.Errorf("\nwant %v\ngot  %v", wantRequest, a.created)
	}
	if err := s.Resize(t.Context(), v.ID, 1<<30); err != nil {
		t.Error(err)
	}
	if stats, err := s.Stats(t.Context(), v.ID); err != nil || stats.VolumeCondition != nil {
		t.Errorf("\nwant statistics without a condition\ngot  %v, error %v", stats, err)
	}
	if want := []string{"check " + want, "resize " + want, "stats " + want}; !reflect.DeepEqual(a.calls, want) {
		t.Errorf("\nwant %v\ngot  %v", want, a.calls)
	}
	if err := s.Detach(t.Context(), v.ID); err != nil {
		t.Error(err)
	}
}

// nameless is a machine whose disks have no serials.
type nameless struct{ machine }

func (nameless) Capabilities() sandbox.Capabilities { return sandbox.Capabilities{Grow: true} }

func TestVolumeWithoutAFilesystemThatCannotBeIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		machine sandbox.Machine
		volume  sandbox.Volume
	}{
		"with mount options":           {machine{newWorld()}, sandbox.Volume{ID: "data", Path: "/stores/data", Options: []string{"noatime"}}},
		"on a machine without serials": {nameless{machine{newWorld()}}, sandbox.Volume{ID: "data", Path: "/stores/data"}},
	} {
		s := sandbox.New(c.machine, agent{newWorld()}, fine)
		if err := s.Attach(t.Context(), c.volume); !errors.Is(err, sandbox.ErrInfeasible) {
			t.Errorf("%s\nwant %v\ngot  %v", name, sandbox.ErrInfeasible, err)
		}
		if state := s.State("data"); state != sandbox.Absent {
			t.Errorf("%s\nwant it %v\ngot  %v", name, sandbox.Absent, state)
		}
	}
}
