package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
)

// recorded records the calls to a machine and to an agent, in order.
type recorded struct {
	*world
	asked *[]string
}

func (r recorded) note(format string, args ...any) {
	*r.asked = append(*r.asked, fmt.Sprintf(format, args...))
}

// plain is a machine with limited capabilities.
type plain struct {
	machine
	recorded recorded
	can      sandbox.Capabilities
}

func (p plain) Capabilities() sandbox.Capabilities { return p.can }

func (p plain) Resize(_ context.Context, _ string, bytes uint64) error {
	p.recorded.note("disk to %d", bytes)
	return nil
}

// foreignAgent is an agent without directvol's own service.
type foreignAgent struct {
	agent
	recorded recorded
	grows    error // its answer when it is asked to grow a filesystem to the device's end
}

func (f foreignAgent) CreateContainer(ctx context.Context, r *agentpb.CreateContainerRequest) error {
	f.recorded.note("mount with %q", r.Storages[0].DriverOptions)
	r.Storages[0].DriverOptions = []string{"serial=" + sandbox.DiskID("c")} // the fake world requires a serial
	return f.agent.CreateContainer(ctx, r)
}

func (f foreignAgent) CheckResizeVolume(context.Context, string, uint64) error {
	return status.Error(codes.Unimplemented, "no such service")
}

func (f foreignAgent) ResizeVolume(_ context.Context, _ string, bytes uint64) error {
	f.recorded.note("filesystem to %d", bytes)
	if bytes == 0 {
		return f.grows
	}
	return nil
}

// If a machine's disks show no serial, the sandbox must not promise one; if its disks do not grow,
// the sandbox must not ask for it. An agent without directvol's service must be asked whether the
// filesystem can grow before the disk grows.
func TestMachinesAndAgentsThatCanDoLess(t *testing.T) {
	refused := status.Error(codes.FailedPrecondition, "run e2fsck")
	serial := fmt.Sprintf("mount with %q", []string{"serial=" + sandbox.DiskID("c")})
	for _, test := range []struct {
		name  string
		can   sandbox.Capabilities
		grows error
		want  error
		asked []string
	}{
		{"all", sandbox.Capabilities{Serial: true, Grow: true}, nil, nil, []string{serial, "filesystem to 0", "disk to 7", "filesystem to 7"}},
		{"no serial", sandbox.Capabilities{Grow: true}, nil, nil, []string{"mount with []", "filesystem to 0", "disk to 7", "filesystem to 7"}},
		{"the filesystem cannot grow", sandbox.Capabilities{Serial: true, Grow: true}, refused, sandbox.ErrInfeasible, []string{serial, "filesystem to 0"}},
		{"the agent grows nothing, as Kata's", sandbox.Capabilities{Serial: true, Grow: true}, status.Error(codes.Unimplemented, "resize_volume is not implemented"), sandbox.ErrInfeasible, []string{serial, "filesystem to 0"}},
		{"no growth", sandbox.Capabilities{Serial: true}, nil, sandbox.ErrInfeasible, []string{serial}},
	} {
		w := newWorld()
		r := recorded{w, new([]string)}
		s := sandbox.New(plain{machine{w}, r, test.can}, foreignAgent{agent{w}, r, test.grows}, fine)
		if err := s.Attach(t.Context(), volumeOf("c")); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Mount(t.Context(), "c"); err != nil {
			t.Fatal(err)
		}
		if err := s.Resize(t.Context(), "c", 7); !errors.Is(err, test.want) {
			t.Errorf("%s: resize\nwant %v\ngot  %v", test.name, test.want, err)
		}
		if !slices.Equal(*r.asked, test.asked) {
			t.Errorf("%s: asked\nwant %q\ngot  %q", test.name, test.asked, *r.asked)
		}
		w.die()
	}
}

// sized is an agent with fixed answers to CheckResizeVolume and ResizeVolume.
type sized struct {
	agent
	check, grow error
}

func (s sized) CheckResizeVolume(context.Context, string, uint64) error { return s.check }
func (s sized) ResizeVolume(context.Context, string, uint64) error      { return s.grow }

// firm is a machine whose disks have a size and cannot shrink.
type firm struct {
	machine
	bytes *uint64
}

func (f firm) Resize(_ context.Context, _ string, bytes uint64) error {
	if bytes < *f.bytes {
		return sandbox.ErrWouldShrink
	}
	*f.bytes = bytes
	return nil
}

// Whether the agent or the machine refuses a smaller size, the disk must stay unchanged.
func TestResizeToASmallerSizeIsErrWouldShrink(t *testing.T) {
	smaller := status.Error(codes.OutOfRange, "the filesystem has more")
	for _, test := range []struct {
		name        string
		check, grow error
		bytes, want uint64
	}{
		{"by the agent", smaller, nil, 4, 8},
		{"by the machine, as the agent knows nothing of it", status.Error(codes.Unimplemented, "no such service"), nil, 4, 8},
		{"by the agent, when its filesystem grew meanwhile", nil, smaller, 16, 16},
	} {
		w, bytes := newWorld(), uint64(8)
		s := sandbox.New(firm{machine{w}, &bytes}, sized{agent{w}, test.check, test.grow}, fine)
		if err := s.Attach(t.Context(), volumeOf("c")); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Mount(t.Context(), "c"); err != nil {
			t.Fatal(err)
		}
		if err := s.Resize(t.Context(), "c", test.bytes); !errors.Is(err, sandbox.ErrWouldShrink) {
			t.Errorf("%s:\nwant %v\ngot  %v", test.name, sandbox.ErrWouldShrink, err)
		}
		if bytes != test.want {
			t.Errorf("%s: the disk\nwant %d bytes\ngot  %d", test.name, test.want, bytes)
		}
		w.die()
	}
}
