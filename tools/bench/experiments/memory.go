package experiments

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

var binarySize = experiment{
	name: "the agent's program",
	lines: []measure.Line{
		{Name: "agent_binary_bytes", Unit: "bytes", Goal: measure.AtMost(7_000_000), What: "directvol-agent, static and stripped"},
	},
	open: func(_ context.Context, l *Setup, _ int) (measure.Session, error) {
		return measure.Session{Run: func(context.Context, func(string)) (measure.Trial, error) {
			bytes, err := strippedSize(l.agentProgram())
			return measure.Trial{"agent_binary_bytes": {float64(bytes)}}, err
		}}, nil
	},
}

// agentProgram returns the path of the agent's program as it is shipped.
func (l *Setup) agentProgram() string { return filepath.Join(l.build.Dir, "directvol-agent") }

// strippedSize returns a program's size. A program that is not stripped is an error, because the
// shipped one is stripped.
func strippedSize(program string) (int64, error) {
	object, err := elf.Open(program)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", program, err)
	}
	defer object.Close()
	if object.Section(".symtab") != nil || object.Section(".debug_info") != nil {
		return 0, fmt.Errorf("%s is not stripped: run make build", program)
	}
	info, err := os.Stat(program)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

const (
	// callsBefore is the number of calls, half Check and half GetVolumeStats, that an agent answers
	// before the first look at its memory, and callsBetween the number between two looks.
	callsBefore, callsBetween = 10_000, 1_000
)

var residentMemory = experiment{
	name: "the guest memory that the agent uses",
	lines: []measure.Line{
		{Name: "agent_rss_anon_bytes", Unit: "bytes", Goal: measure.AtMost(5_000_000), What: "its RssAnon after 10,000 calls, half Check, half GetVolumeStats"},
		{Name: "agent_memory_bytes", Unit: "bytes", What: "program and RssAnon together: their cost in a guest whose root is an initramfs"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		guest, err := l.theGuest(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		to, err := agentAddress(guest)
		if err != nil {
			return measure.Session{}, err
		}
		return l.openMemory(ctx, guest, server{"agent_", l.agentProgram(), to, 1})
	},
}

// server is an agent that runs in the guest. prefix begins the names of its rows.
type server struct {
	prefix, program string // the program on the host
	address         address.Address
	pid             int
}

func (l *Setup) openMemory(ctx context.Context, guest *vm.Guest, s server) (measure.Session, error) {
	program, err := os.Stat(s.program)
	if err != nil {
		return measure.Session{}, err
	}
	client, err := agentclient.Dial(ctx, s.address, agentclient.Config{})
	if err != nil {
		return measure.Session{}, err
	}
	volume, err := l.mountedDisk(ctx, guest)
	if err != nil {
		client.Close()
		return measure.Session{}, err
	}
	calls := callsBefore
	return measure.Session{
		Run: func(ctx context.Context, say func(string)) (measure.Trial, error) {
			if err := callAgent(ctx, client, volume.GuestPath, calls, say); err != nil {
				return nil, err
			}
			calls = callsBetween
			anon, err := rssAnon(ctx, guest.Remote, s.pid)
			bytes := float64(program.Size())
			return measure.Trial{s.prefix + "binary_bytes": {bytes}, s.prefix + "rss_anon_bytes": {anon}, s.prefix + "memory_bytes": {bytes + anon}}, err
		},
		Close: func(ctx context.Context) error {
			client.Close()
			return volume.remove(ctx)
		},
	}, nil
}

// callAgent makes a number of calls, half of them Check and half GetVolumeStats.
func callAgent(ctx context.Context, client *agentclient.Client, volume string, calls int, say func(string)) error {
	for i := range calls / 2 {
		if i%250 == 0 {
			say(fmt.Sprintf("call %d of %d", 2*i, calls))
		}
		if err := client.Check(ctx); err != nil {
			return err
		}
		if _, err := client.GetVolumeStats(ctx, volume); err != nil {
			return err
		}
	}
	return nil
}

// lastPID is the last number that findProcess checks: a test guest has started about two hundred
// processes.
const lastPID = 2000

// findProcess returns the number of the guest's first process with a name.
func findProcess(ctx context.Context, guest *vm.Guest, name string) (pid int, err error) {
	for pid := 2; pid <= lastPID; pid++ {
		comm, err := guest.Remote.ReadFile(ctx, fmt.Sprintf("/proc/%d/comm", pid))
		if err == nil && strings.TrimSpace(string(comm)) == name {
			return pid, nil
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	return 0, fmt.Errorf("no process of the guest is called %s", name)
}

// rssAnon reads a process's anonymous memory: the pages that it has written to, without the pages
// of its program.
func rssAnon(ctx context.Context, a *remote.Client, pid int) (float64, error) {
	path := fmt.Sprintf("/proc/%d/status", pid)
	status, err := a.ReadFile(ctx, path)
	if err != nil {
		return 0, err
	}
	return parseRSSAnon(path, string(status))
}

// parseRSSAnon reads the value from a /proc/PID/status, see proc(5).
func parseRSSAnon(path, status string) (float64, error) {
	for text := range strings.Lines(status) {
		value, ok := strings.CutPrefix(text, "RssAnon:")
		if !ok {
			continue
		}
		var kib uint32
		if _, err := fmt.Sscanf(value, "%d kB", &kib); err != nil {
			return 0, fmt.Errorf("%s: %q: %w", path, strings.TrimSpace(text), err)
		}
		return float64(kib) * 1024, nil
	}
	return 0, fmt.Errorf("%s has no RssAnon", path)
}
