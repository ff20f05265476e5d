package killed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

const (
	// callLimit is the time limit of a call, as a base for vm.Limit.
	callLimit = 10 * time.Second
	// bootLimit is the same for a start, and jobLimit for a round.
	bootLimit = 25 * time.Second
	jobLimit  = 2 * time.Minute
)

// guest is a guest that a host's process runs.
type guest struct {
	host    *hostProcess
	dir     string
	service bool
	remote  *remote.Client

	// The mount points in the guest and QEMU's parts, before the first volume.
	mounts, parts []string
}

// startGuest starts a guest, in a directory that an earlier guest may have used.
func startGuest(ctx context.Context, h *hostProcess, dir string, service bool) (*guest, error) {
	g := &guest{host: h, dir: dir, service: service}
	a, err := h.call(ctx, request{Call: start, Limit: vm.Limit(bootLimit), Boot: boot{Dir: dir, Console: consoleFile(dir), Service: service}})
	if err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	to, err := address.Parse(a.Text)
	if err != nil {
		return nil, err
	}
	g.remote = remote.NewClient(func(ctx context.Context, port uint32) (net.Conn, error) {
		to := to
		to.Port = port
		return to.Dial(ctx)
	})
	if g.mounts, err = g.mountPoints(ctx); err != nil {
		return nil, err
	}
	g.parts, err = g.look(ctx)
	return g, err
}

func consoleFile(dir string) string { return filepath.Join(dir, "console") }

// do makes a call of the guest's sandbox.
func (g *guest) do(ctx context.Context, r request) (answer, error) {
	r.Limit = vm.Limit(callLimit)
	a, err := g.host.call(ctx, r)
	if err != nil {
		err = fmt.Errorf("%s %s: %w", r.Call, r.Volume.ID, err)
	}
	return a, err
}

func (g *guest) simply(ctx context.Context, c call) error {
	_, err := g.do(ctx, request{Call: c})
	return err
}

func (g *guest) look(ctx context.Context) ([]string, error) {
	a, err := g.do(ctx, request{Call: look})
	return a.Parts, err
}

// mountPoints returns the mount points according to the guest's kernel.
func (g *guest) mountPoints(ctx context.Context) ([]string, error) {
	text, err := g.remote.ReadFile(ctx, "/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var points []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			return nil, fmt.Errorf("mountinfo: %q", line)
		}
		points = append(points, fields[4])
	}
	slices.Sort(points)
	return points, nil
}

// left returns the mounts and parts in the guest and in its QEMU that were not there at the start.
func (g *guest) left(ctx context.Context) ([]string, error) {
	mounts, err := g.mountPoints(ctx)
	if err != nil {
		return nil, err
	}
	parts, err := g.look(ctx)
	if err != nil {
		return nil, err
	}
	var left []string
	for _, point := range beyond(mounts, g.mounts) {
		left = append(left, "a mount at "+point)
	}
	left = append(left, beyond(parts, g.parts)...)
	for _, lost := range beyond(g.parts, parts) {
		left = append(left, "not any more: "+lost)
	}
	if g.service {
		agents, err := g.remote.Signal(ctx, remote.Agent, 0)
		if err != nil || len(agents) != 1 {
			left = append(left, fmt.Sprintf("agents %v (%v)", agents, err))
		}
	}
	return left, nil
}

// beyond returns the elements of all that are not in some. It counts repeated elements.
func beyond(all, some []string) []string {
	more := slices.Clone(all)
	for _, s := range some {
		if at := slices.Index(more, s); at >= 0 {
			more = slices.Delete(more, at, at+1)
		}
	}
	return more
}

// stop ends the guest in order, as far as possible: an agent that is a service does not power off.
func (g *guest) stop(ctx context.Context) error {
	if !g.service {
		return g.simply(ctx, stop)
	}
	if err := g.simply(ctx, destroy); err != nil {
		return err
	}
	return g.simply(ctx, end)
}

// processes returns QEMU and, if there is one, the vsock backend.
func (g *guest) processes() (map[target]vm.Process, error) {
	all, err := vm.ProcessesWith(vmDir(g.dir))
	if err != nil {
		return nil, err
	}
	of := map[target]vm.Process{}
	for _, p := range all {
		if p.IsBackend() {
			of[vsock] = p
		} else {
			of[qemu] = p
		}
	}
	if len(of) != len(all) || of[qemu].ID == 0 {
		return nil, fmt.Errorf("want QEMU and at most one backend, got %v", all)
	}
	return of, nil
}

// leftOnHost returns what an ended VM has left on the host: processes, files and locks. If sockets
// is set, it ignores sockets, which a killed host's process may leave.
func leftOnHost(ctx context.Context, dir string, sockets bool) (left []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(callLimit))
	defer cancel()
	var running []vm.Process
	// The processes end with their parent, and another process reaps them.
	gone := vm.Again(ctx, func() (bool, error) {
		running, err = vm.ProcessesWith(vmDir(dir))
		return len(running) == 0, err
	})
	if gone != nil && ctx.Err() == nil {
		return nil, gone
	}
	for _, p := range running {
		left = append(left, fmt.Sprintf("process %d: %v", p.ID, p.Args))
	}
	files, err := os.ReadDir(vmDir(dir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, file := range files {
		if sockets && file.Type()&os.ModeSocket != 0 {
			continue
		}
		left = append(left, "file "+filepath.Join(vmDir(dir), file.Name()))
	}
	return left, nil
}
