package vsock

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// backend is the process of a guest's vsock device.
type backend struct {
	pid int
}

// backendOf finds the backend by the socket on its command line. If the host's kernel carries
// vsock, there is no backend.
func backendOf(t *testing.T, g *vm.Guest) backend {
	t.Helper()
	to, err := address.Parse(g.VM().AgentAddress())
	vmtest.Must(t, err)
	if to.Scheme != address.HVSock {
		t.Skipf("the agent is at %s: this host's kernel carries vsock, and no backend runs; run this where there is no /dev/vhost-vsock", to)
	}
	processes, err := vm.ProcessesWith(to.Path)
	vmtest.Must(t, err)
	for _, p := range processes {
		if p.IsBackend() {
			return backend{p.ID}
		}
	}
	t.Fatalf("no process is the backend at %s", to.Path)
	return backend{}
}

// openFiles counts the backend's descriptors.
func (b backend) openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.pid))
	vmtest.Must(t, err)
	return len(files)
}

// awaitFiles waits until the backend has that number of open files, because it closes a client's
// files a little later than the client.
func (b backend) awaitFiles(t *testing.T, ctx context.Context, want int) {
	t.Helper()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		got := b.openFiles(t)
		if got == want {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("open files of the backend\nwant %d\ngot  %d", want, got)
		}
	}
}

// status returns a number of /proc/PID/status: Threads, or RssAnon in KiB.
func (b backend) status(t *testing.T, field string) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.pid))
	vmtest.Must(t, err)
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if name == field {
			n, err := strconv.Atoi(strings.Fields(value)[0])
			vmtest.Must(t, err)
			return n
		}
	}
	t.Fatalf("no %s in\n%s", field, text)
	return 0
}
