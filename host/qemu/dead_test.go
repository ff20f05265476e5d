package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/host/holders"
	"github.com/directvol/directvol/host/registry"
	"github.com/directvol/directvol/host/trial/trialtest"
)

// frozen returns a file in a filesystem of its own, which freeze stops and thaw resumes.
func frozen(t *testing.T) (path string, freeze, thaw func()) {
	t.Helper()
	dir, freeze, thaw := trialtest.Freezable(t, 32*mib)
	path = filepath.Join(dir, "store")
	must(t, os.WriteFile(path, make([]byte, mib), 0o600))
	return path, freeze, thaw
}

// A QEMU with a thread that writes to a dead disk takes its SIGKILL only when the disk answers.
// Kill must return in time and name what is left and why; until QEMU has ended, nobody else may
// have the store.
func TestRealQEMUThatWaitsForADeadDiskIsNamedAndEndsWithIt(t *testing.T) {
	vm, thaw := withHangingWrite(t)
	path := vm.disks.find("dead").Path
	awaitState(t, vm.qemu, "D")
	for range 2 {
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		err := vm.Kill(ctx)
		cancel()
		if want := fmt.Sprintf("QEMU (process %d, state D)", vm.qemu.cmd.Process.Pid); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), want) {
			t.Errorf("Kill, after %v\nwant %q\ngot  %v", time.Since(began), want, err)
		}
	}
	store, err := registry.Default().Find(path)
	must(t, err)
	defer store.Close()
	if err := store.Claim("the next VM", false); !errors.As(err, new(*holders.InUseError)) {
		t.Errorf("another VM gets the store\nwant it in use\ngot  %v", err)
	}
	thaw()
	must(t, vm.Kill(limited(t)))
	must(t, store.Claim("the next VM", false))
}

// awaitState waits until describe reports the state for a process.
func awaitState(t *testing.T, p *process, state string) {
	t.Helper()
	ctx := limited(t)
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for !strings.HasSuffix(p.describe(), "state "+state+")") {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("%s does not come to state %s", p.describe(), state)
		}
	}
}
