package rescue

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tests/vm"
)

const (
	diskBytes  = 304 * miB // four allocation groups of 76 MiB
	grownBytes = 420 * miB // and two more
	fileBytes  = 4096
	files      = 8
)

// cut is a volume that was cut off.
type cut struct {
	sandbox.Volume
	ledgers map[string]*act.Ledger // of each file, by its path in the volume, what fsync has acknowledged
}

// cutOff makes an xfs, grows it under a mount, uses what was added and kills the
// VM: the growth is in the log and in the new groups' superblocks by then, and not
// yet in the primary superblock. All of it happens behind the agent's back, which
// might write the superblock out.
func cutOff(t *testing.T) cut {
	t.Helper()
	ctx := within(t, jobLimit)
	image, err := vm.Scratch(ctx, t.TempDir(), "xfs", diskBytes)
	must(t, err)
	c := cut{sandbox.Volume{ID: "data", Path: image, FSType: "xfs"}, map[string]*act.Ledger{}}
	g := boot(t, ctx)
	defer end(t, g)
	device := deviceOf(t, ctx, g, c.Volume)
	const dir = "/run/cut"
	must(t, g.Act.Mkdir(ctx, dir, 0o755))
	must(t, g.Act.Mount(ctx, act.Mount{Source: device, Target: dir, FSType: "xfs"}))
	must(t, g.VM().ResizeDisk(ctx, c.ID, grownBytes))
	awaitSize(t, ctx, g, device)
	_, err = g.Act.Grow(ctx, act.Grow{Path: dir, FSType: "xfs", Bytes: grownBytes})
	must(t, err)
	for i := range files { // xfs puts each new directory into another group
		in := fmt.Sprintf("/dir-%d", i)
		must(t, g.Act.Mkdir(ctx, dir+in, 0o755))
		writer, err := g.Act.StartWriter(ctx, act.WriteBlocks{Path: dir + in + "/file", BlockBytes: fileBytes, Seed: uint64(i), LimitBytes: fileBytes})
		must(t, err)
		must(t, writer.Err())
		c.ledgers[in+"/file"] = writer.Ledger()
	}
	return c
}

// copied is the same volume on a disk of its own. An attempt to mount changes a disk,
// also one that fails: it writes what it has recovered.
func (c cut) copied(t *testing.T) cut {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy.img")
	if out, err := exec.CommandContext(within(t, callLimit), "cp", "--sparse=always", c.Path, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v\n%s", err, out)
	}
	c.Path = to
	return c
}

// deviceOf attaches a volume and returns its /dev name in the guest, which the agent knows how to find.
func deviceOf(t *testing.T, ctx context.Context, g *vm.Guest, v sandbox.Volume) string {
	t.Helper()
	must(t, g.Attach(ctx, v))
	_, err := g.Mount(ctx, v.ID)
	must(t, err)
	must(t, g.Unmount(ctx, v.ID))
	return "/dev/vda" // the guest has no other disk
}

// awaitSize waits until the guest's kernel knows that the disk has grown.
func awaitSize(t *testing.T, ctx context.Context, g *vm.Guest, device string) {
	t.Helper()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		bytes, err := g.Act.DeviceSize(ctx, device)
		must(t, err)
		if bytes == grownBytes {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("%s\nwant %d bytes\ngot  %d", device, grownBytes, bytes)
		}
	}
}

// verify compares, in a guest that has the volume mounted, every file with what
// fsync has acknowledged.
func (c cut) verify(t *testing.T, ctx context.Context, g *vm.Guest, mountPoint string) {
	t.Helper()
	for file, ledger := range c.ledgers {
		found, err := g.Act.Verify(ctx, mountPoint+file, ledger, nil)
		if err == nil {
			err = found.Err()
		}
		if err != nil || found.Bytes != fileBytes {
			t.Errorf("%s, which fsync has acknowledged\nwant %d bytes, equal\ngot  %d, error %v", file, fileBytes, found.Bytes, err)
		}
	}
}

// boot boots a guest with the kernel that the volume is cut under. The caller ends it.
func boot(t *testing.T, ctx context.Context) *vm.Guest {
	t.Helper()
	g, err := vm.Boot(ctx, vm.Options{})
	must(t, err)
	return g
}

// end pulls a guest's plug, and tells of it first if the test has failed.
func end(t *testing.T, g *vm.Guest) {
	if t.Failed() {
		g.Explain(t.Output())
	}
	g.Kill()
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}
