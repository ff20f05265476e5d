package ways

import (
	"bytes"
	"syscall"
	"testing"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tests/vm"
)

// PID 1 that is told to end unmounts all, also from under a process that writes, and
// powers off: what nobody has synced is there afterwards.
func TestPID1ThatIsSignalledLosesNothingUnsynced(t *testing.T) {
	var volumes []sandbox.Volume
	for _, fstype := range []string{"ext4", "xfs"} {
		image, err := vm.Scratch(limited(t), t.TempDir(), fstype, 304<<20)
		must(t, err)
		volumes = append(volumes, sandbox.Volume{ID: fstype, Path: image, FSType: fstype})
	}
	unsynced := func(name string) []byte { return bytes.Repeat([]byte(name), 1<<14) }
	before := ""
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGPWR, 0} {
		g, err := vm.Boot(within(t, jobLimit), vm.Options{})
		must(t, err)
		explained(t, g)
		for _, v := range volumes {
			must(t, g.Attach(limited(t), v))
			mounted, err := g.Mount(limited(t), v.ID)
			must(t, err)
			if before != "" {
				if got, err := g.Act.ReadFile(limited(t), mounted+"/"+before); err != nil || !bytes.Equal(got, unsynced(before)) {
					t.Errorf("%s: what was written before %s\nwant it there\ngot  %d bytes, error %v", v.FSType, before, len(got), err)
				}
			}
			if signal == 0 {
				continue
			}
			must(t, g.Act.WriteFile(limited(t), mounted+"/"+signal.String(), unsynced(signal.String())))
			_, err = g.Act.StartWriter(within(t, jobLimit), act.WriteBlocks{Path: mounted + "/writer", BlockBytes: 4096, Unsynced: true})
			must(t, err)
		}
		if signal == 0 {
			g.Kill()
			return
		}
		_, _ = g.Act.Signal(limited(t), act.Agent, signal) // who answers may have ended
		how, err := g.VM().AwaitShutdown(limited(t))
		if want := (qemu.Shutdown{Guest: true, Reason: "guest-shutdown"}); err != nil || how != want {
			t.Fatalf("%v\nwant %+v\ngot  %+v, error %v", signal, want, how, err)
		}
		before = signal.String()
	}
}

// explained tells of a guest where its test fails, and ends it.
func explained(t *testing.T, g *vm.Guest) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			g.Explain(t.Output())
		}
		g.Kill()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
}
