package mount

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/directvol/directvol/agent/flight"
)

// elsewhereLimit is how long Elsewhere waits: a process that is stuck in the kernel may
// keep everybody waiting who looks at its folder below /proc.
const elsewhereLimit = time.Second

var looks flight.Flights[string, []namespace]

// namespace is a mount namespace, by a process in it.
type namespace struct {
	pid, name string
	mounts    []*Info
}

// Elsewhere names a process of each other mount namespace that has a block device
// mounted, by its dev_t. Where that takes more than a second it says so instead, and one
// thread goes on.
func Elsewhere(device uint64) (processes []string) { return elsewhere("/proc", device) }

func elsewhere(proc string, device uint64) (processes []string) {
	ctx, cancel := context.WithTimeout(context.Background(), elsewhereLimit)
	defer cancel()
	all, ok := looks.Ask(ctx, proc, func() []namespace { return namespaces(proc) })
	if !ok {
		return []string{"a process does not let its mounts be read"}
	}
	for _, n := range all {
		if hasDevice(n.mounts, device) {
			processes = append(processes, fmt.Sprintf("mounted where process %s runs, %.15q", n.pid, n.name))
		}
	}
	return processes
}

// namespaces reads the mounts of each mount namespace that a process is in.
func namespaces(proc string) (found []namespace) {
	seen := map[string]bool{}
	all, _ := os.ReadDir(proc)
	for _, entry := range all {
		pid := entry.Name()
		id, err := os.Readlink(filepath.Join(proc, pid, "ns/mnt"))
		if err != nil || seen[id] {
			continue // no process, or known
		}
		mounts, err := readInfo(filepath.Join(proc, pid, "mountinfo"))
		if seen[id] = err == nil; err != nil {
			continue
		}
		name, _ := os.ReadFile(filepath.Join(proc, pid, "comm"))
		found = append(found, namespace{pid, strings.TrimSpace(string(name)), mounts})
	}
	return found
}
