//go:build long

package cuts

import (
	"context"
	"testing"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// A short last group is extended, and then gets further groups after it. Since Linux 6.5, recovery
// regards the log's records from the time of the shorter group as damaged if the superblock on the
// disk already has the later groups.
func TestShortGroupThatGrewInTheLogMountsOnTheNewerKernel(t *testing.T) {
	for name, grow := range map[string]func(context.Context, *testing.T, *disk){"by the agent": growInSteps, "by somebody else": growAtOnce} {
		t.Run(name, func(t *testing.T) { growsShort(t, grow) })
	}
}

func growsShort(t *testing.T, grow func(context.Context, *testing.T, *disk)) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*vm.Limit(volumeLimit))
	defer cancel()
	image, err := vm.Scratch(ctx, t.TempDir(), "xfs", 304*miB) // four groups
	if err != nil {
		t.Fatal(err)
	}
	v := sandbox.Volume{ID: "short", Path: image, FSType: "xfs"}
	ledger := usedAndCut(ctx, t, v, grow)
	g := newerGuest(ctx, t)
	mounted := mountVolume(ctx, t, g, v)
	found, err := g.Remote.Verify(ctx, mounted+"/"+written, ledger, nil)
	if err != nil || found.Err() != nil || found.Blocks == 0 {
		t.Errorf("want every block\ngot  %v, error %v", found, err)
	}
}

// growInSteps grows a filesystem in steps: its last group is short, then longer, then one of many.
func growInSteps(ctx context.Context, t *testing.T, d *disk) {
	for _, goal := range []uint64{340 * miB, 360 * miB, 420 * miB} {
		if err := d.guest.Sandbox.Resize(ctx, d.id, goal); err != nil {
			t.Fatal(err)
		}
	}
}

// growAtOnce makes xfs_growfs's ioctl do the second and the third step at once, and then calls the
// agent's ResizeVolume.
func growAtOnce(ctx context.Context, t *testing.T, d *disk) {
	if err := d.guest.Sandbox.Resize(ctx, d.id, 340*miB); err != nil {
		t.Fatal(err)
	}
	foreign := *d
	foreign.agent, foreign.id, foreign.device = false, d.diskID(), "/dev/vda" // the guest's only disk
	if err := foreign.grow(ctx, 420*miB); err != nil {
		t.Fatal(err)
	}
	if err := d.guest.Sandbox.Resize(ctx, d.id, 420*miB); err != nil {
		t.Fatal(err)
	}
}

// usedAndCut grows a volume under a writer and kills the guest. It returns the acknowledged blocks.
func usedAndCut(ctx context.Context, t *testing.T, v sandbox.Volume, grow func(context.Context, *testing.T, *disk)) *remote.Ledger {
	t.Helper()
	g := newerGuest(ctx, t)
	mounted := mountVolume(ctx, t, g, v)
	writer, err := g.Remote.StartWriter(ctx, remote.WriteBlocks{Path: mounted + "/" + written, BlockBytes: blockBytes, Apart: true})
	if err != nil {
		t.Fatal(err)
	}
	grow(ctx, t, &disk{way: ways["agent"], guest: g, id: v.ID, fstype: v.FSType, path: v.Path, mounted: mounted})
	if err := writer.Await(ctx, writer.Ledger().Bytes()+4*blockBytes); err != nil {
		t.Fatal(err)
	}
	g.Kill()
	return writer.Ledger()
}

func mountVolume(ctx context.Context, t *testing.T, g *vm.Guest, v sandbox.Volume) string {
	t.Helper()
	if err := g.Attach(ctx, v); err != nil {
		t.Fatal(err)
	}
	mounted, err := g.Mount(ctx, v.ID)
	if err != nil {
		t.Fatal(err)
	}
	return mounted
}

// newerGuest boots a guest with the newer kernel, which ends with the test.
func newerGuest(ctx context.Context, t *testing.T) *vm.Guest {
	t.Helper()
	g, err := vm.Boot(ctx, vm.Options{Newer: true, Append: tellWarnings})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			g.Explain(t.Output())
		}
		g.Kill()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}
