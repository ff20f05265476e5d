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

// elsewhereLimit bounds how long Elsewhere waits: a process that is stuck in the kernel may block
// every reader of its directory below /proc.
const elsewhereLimit = time.Second

// search is the question which processes have a device mounted.
type search struct {
	proc   string
	device uint64
}

var looks flight.Flights[search, []string]

// Places returns where a block device, given by its dev_t, is mounted in this process's namespace.
func Places(device uint64) (mountPoints []string) {
	all, _ := All()
	for _, m := range all {
		if hasDevice([]*Info{m}, device) {
			mountPoints = append(mountPoints, m.Mountpoint)
		}
	}
	return mountPoints
}

// Elsewhere names one process of each other mount namespace that has a block device, given by its
// dev_t, mounted. If that takes more than a second, Elsewhere returns a note instead, and one
// thread per device goes on.
func Elsewhere(device uint64) (processes []string) { return elsewhere(search{"/proc", device}) }

func elsewhere(one search) (processes []string) {
	ctx, cancel := context.WithTimeout(context.Background(), elsewhereLimit)
	defer cancel()
	processes, ok := looks.Ask(ctx, one, one.at)
	if !ok {
		return []string{"a process whose mounts cannot be read"}
	}
	return processes
}

// at reads each mount namespace only once, because each may hold many mounts.
func (s search) at() (processes []string) {
	own, _ := os.Readlink(filepath.Join(s.proc, "self/ns/mnt"))
	seen := map[string]bool{own: true}
	all, _ := os.ReadDir(s.proc)
	for _, entry := range all {
		pid := entry.Name()
		namespace, err := os.Readlink(filepath.Join(s.proc, pid, "ns/mnt"))
		if err != nil || seen[namespace] {
			continue // no process, or a namespace that was read already
		}
		mounts, err := readInfo(filepath.Join(s.proc, pid, "mountinfo"))
		seen[namespace] = err == nil
		if err != nil || !hasDevice(mounts, s.device) {
			continue
		}
		name, _ := os.ReadFile(filepath.Join(s.proc, pid, "comm"))
		processes = append(processes, fmt.Sprintf("mounted in the mount namespace of process %s, %.15q", pid, strings.TrimSpace(string(name))))
	}
	return processes
}
