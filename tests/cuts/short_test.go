package cuts

import (
	"context"
	"testing"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tests/vm"
)

// A short last group is made longer, and then gets groups behind it. Since Linux 6.5
// recovery takes what the log has of its shorter time for damaged, if the superblock
// on the disk has the later groups already.
func TestShortGroupThatGrewInTheLogMountsOnTheNewerKernel(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*vm.Limit(volumeLimit))
	defer cancel()
	image, err := vm.Scratch(ctx, t.TempDir(), "xfs", 304*miB) // four groups
	if err != nil {
		t.Fatal(err)
	}
	v := sandbox.Volume{ID: "short", Path: image, FSType: "xfs"}
	ledger := growShort(ctx, t, v)
	g := newerGuest(ctx, t)
	mounted := mountVolume(ctx, t, g, v)
	found, err := g.Act.Verify(ctx, mounted+"/"+written, ledger, nil)
	if err != nil || found.Err() != nil || found.Blocks == 0 {
		t.Errorf("want every block\ngot  %v, error %v", found, err)
	}
}

// growShort grows a volume three times under a writer and pulls the plug. It returns
// what was acknowledged.
func growShort(ctx context.Context, t *testing.T, v sandbox.Volume) *act.Ledger {
	t.Helper()
	g := newerGuest(ctx, t)
	mounted := mountVolume(ctx, t, g, v)
	writer, err := g.Act.StartWriter(ctx, act.WriteBlocks{Path: mounted + "/" + written, BlockBytes: blockBytes, Apart: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, goal := range []uint64{340 * miB, 360 * miB, 420 * miB} {
		if err := g.Sandbox.Resize(ctx, v.ID, goal); err != nil {
			t.Fatal(err)
		}
	}
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

// newerGuest is ended with the test.
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
