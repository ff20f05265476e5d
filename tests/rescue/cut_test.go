package rescue

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	groupBytes = 76 * miB       // size of an allocation group
	diskBytes  = 4 * groupBytes // size of the new disk
	fileBytes  = 4096
	files      = 12 // number after each growth
)

// grownOnce is the size to which a volume is grown. It is not a multiple of a group's size: the log
// then contains the short last group from the time when it was short.
var grownOnce = []uint64{420 * miB}

// cut is a volume after a power cut.
type cut struct {
	sandbox.Volume
	bytes   uint64                    // its last size
	ledgers map[string]*remote.Ledger // the acknowledged blocks of each file, by the file's path in the volume
}

// cutOff makes an xfs, grows it under a mount to several sizes, uses the new space each time, and
// kills the VM. At that time the growths are in the log and in the secondary superblocks, but not
// in the primary one. The agent does not take part, because it would write the superblock.
func cutOff(t *testing.T, sizes []uint64) cut {
	t.Helper()
	ctx := vmtest.Within(t, vmtest.JobLimit)
	c := newCut(t, ctx)
	g := vmtest.Boot(t, vm.Options{})
	defer g.Kill() // like pulling the plug
	vmtest.Must(t, g.Attach(ctx, c.Volume))
	awaitSize(t, ctx, g, diskBytes)
	vmtest.Must(t, bareMount(t, ctx, g))
	for _, c.bytes = range sizes {
		c.grow(t, ctx, g)
		c.fill(t, ctx, g, files)
	}
	return c
}

func newCut(t *testing.T, ctx context.Context) cut {
	t.Helper()
	image, err := vm.Scratch(ctx, t.TempDir(), "xfs", diskBytes)
	vmtest.Must(t, err)
	return cut{Volume: sandbox.Volume{ID: "data", Path: image, FSType: "xfs"}, bytes: diskBytes, ledgers: map[string]*remote.Ledger{}}
}

// grow grows disk and filesystem to c.bytes.
func (c cut) grow(t *testing.T, ctx context.Context, g *vm.Guest) {
	t.Helper()
	vmtest.Must(t, g.VM().ResizeDisk(ctx, c.DiskID(), c.bytes))
	awaitSize(t, ctx, g, c.bytes)
	_, err := g.Remote.Grow(ctx, remote.Grow{Path: mountPoint, FSType: "xfs", Bytes: c.bytes})
	vmtest.Must(t, err)
}

// fill writes files, each into a new directory, because xfs puts each new directory into another
// group.
func (c cut) fill(t *testing.T, ctx context.Context, g *vm.Guest, files int) {
	t.Helper()
	for range files {
		in := fmt.Sprintf("/dir-%d", len(c.ledgers))
		vmtest.Must(t, g.Remote.Mkdir(ctx, mountPoint+in, 0o755))
		writer, err := g.Remote.StartWriter(ctx, remote.WriteBlocks{Path: mountPoint + in + "/file", BlockBytes: fileBytes, Seed: uint64(len(c.ledgers)), LimitBytes: fileBytes})
		vmtest.Must(t, err)
		vmtest.Must(t, writer.Err())
		c.ledgers[in+"/file"] = writer.Ledger()
	}
}

const (
	device     = "/dev/vda" // the guest's only disk
	mountPoint = "/run/cut"
)

// bareMount makes exactly one mount(2), because the agent may try several times.
func bareMount(t *testing.T, ctx context.Context, g *vm.Guest) error {
	t.Helper()
	if err := g.Remote.Mkdir(ctx, mountPoint, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
	return g.Remote.Mount(ctx, remote.Mount{Source: device, Target: mountPoint, FSType: "xfs"})
}

// copied returns a copy of the volume on another disk. An attempt to mount changes a disk even if
// it fails, because it writes what it has recovered.
func (c cut) copied(t *testing.T) cut {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy.img")
	if out, err := exec.CommandContext(vmtest.Within(t, vmtest.CallLimit), "cp", "--sparse=always", c.Path, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v\n%s", err, out)
	}
	c.Path = to
	return c
}

// awaitSize waits until the disk has that size in the guest's kernel.
func awaitSize(t *testing.T, ctx context.Context, g *vm.Guest, want uint64) {
	t.Helper()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		bytes, err := g.Remote.DeviceSize(ctx, device)
		if err == nil && bytes == want {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("%s\nwant %d bytes\ngot  %d, error %v", device, want, bytes, err)
		}
	}
}

// verify compares every file with the acknowledged blocks, in a guest that has mounted the volume.
func (c cut) verify(t *testing.T, ctx context.Context, g *vm.Guest, mountPoint string) {
	t.Helper()
	for file, ledger := range c.ledgers {
		found, err := g.Remote.Verify(ctx, mountPoint+file, ledger, nil)
		if err == nil {
			err = found.Err()
		}
		if err != nil || found.Bytes != fileBytes {
			t.Errorf("%s, which fsync has acknowledged\nwant %d bytes, equal\ngot  %d, error %v", file, fileBytes, found.Bytes, err)
		}
	}
}
