package vsock

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	blockBytes  = 64 * kiB
	writtenName = "written"
	// limitBytes is more than the writer gets to write. aloneBytes is the number of bytes that the
	// disk must receive while the guest is unreachable: at least half of it belongs to the file,
	// the rest to the journal.
	limitBytes = 192 * miB
	aloneBytes = 16 * miB
)

// TestVolumesGoOnWithoutVsock kills the backend of a guest that is writing. From then on nobody can
// ask the guest about its writes, so they are read from the image after the VM has ended.
func TestVolumesGoOnWithoutVsock(t *testing.T) {
	g := shared.Last(t)
	b := backendOf(t, g)
	v, err := g.Volume(vmtest.Limited(t), "data", "ext4", 256*miB)
	vmtest.Must(t, err)
	vmtest.Must(t, v.Mount(vmtest.Limited(t)))
	w, err := g.Remote.StartWriter(vmtest.Within(t, vmtest.JobLimit), remote.WriteBlocks{Path: v.GuestPath + "/" + writtenName, BlockBytes: blockBytes, Seed: 1, LimitBytes: limitBytes, Detached: true})
	vmtest.Must(t, err)
	vmtest.Must(t, w.Await(vmtest.Limited(t), 4*blockBytes))
	vmtest.Must(t, unix.Kill(b.pid, unix.SIGKILL))
	<-g.VM().VsockDone()
	if w.Err() == nil {
		t.Fatal("the writer had reached its limit before: this test shows nothing")
	}

	t.Run("is told as what it is", func(t *testing.T) { toldAsWhatItIs(t, g) })
	t.Run("disks can still be changed", func(t *testing.T) {
		other, err := g.Volume(vmtest.Limited(t), "other", "ext4", 64*miB)
		vmtest.Must(t, err)
		vmtest.Must(t, g.Attach(vmtest.Limited(t), other.Volume))
		vmtest.Must(t, g.VM().ResizeDisk(vmtest.Limited(t), other.DiskID(), 96*miB))
	})
	t.Run("the writer goes on", func(t *testing.T) { awaitWritten(t, g) })
	t.Run("it stops by its power button", func(t *testing.T) {
		vmtest.Must(t, g.Stop(vmtest.Within(t, vmtest.JobLimit)))
		got, err := g.VM().AwaitShutdown(vmtest.Limited(t))
		if want := (qemu.Shutdown{Guest: true, Reason: "guest-shutdown"}); err != nil || got != want {
			t.Errorf("the VM's end\nwant %+v\ngot  %+v, %v", want, got, err)
		}
	})
	t.Run("all that was written is there", func(t *testing.T) { writtenIsThere(t, v, w.Ledger().Bytes()+aloneBytes/2) })
}

// toldAsWhatItIs requires every call to fail at once, with the reason.
func toldAsWhatItIs(t *testing.T, g *vm.Guest) {
	why := g.VM().VsockErr()
	for _, words := range []string{"vsock backend", "killed", "disks keep working"} {
		if why == nil || !strings.Contains(why.Error(), words) {
			t.Errorf("VsockErr\nwant %q in it\ngot  %v", words, why)
		}
	}
	for name, call := range map[string]func(context.Context) error{
		"Check": g.Agent().Check,
		"CreateContainer": func(ctx context.Context) error {
			return g.Agent().CreateContainer(ctx, &agentpb.CreateContainerRequest{ContainerId: "cc"})
		},
	} {
		err := call(vmtest.Limited(t))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), why.Error()) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, agentclient.ErrOutcomeUnknown) {
			t.Errorf("%s\nwant %v: %v\ngot  %v", name, codes.Unavailable, why, err)
		}
	}
}

// blockStats is query-blockstats' answer about a device (qapi/block-core.json).
type blockStats struct {
	Device string `json:"qdev"`
	Stats  struct {
		Bytes      uint64 `json:"wr_bytes"`
		Operations uint64 `json:"wr_operations"`
	} `json:"stats"`
}

// awaitWritten waits until QEMU has carried out a number of further writes.
func awaitWritten(t *testing.T, g *vm.Guest) {
	ctx := vmtest.Within(t, vmtest.JobLimit)
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	first := written(t, ctx, g)
	for now := first; now.Stats.Bytes < first.Stats.Bytes+aloneBytes || now.Stats.Operations == first.Stats.Operations; now = written(t, ctx, g) {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("bytes written\nwant %d more than %d\ngot  %d", aloneBytes, first.Stats.Bytes, now.Stats.Bytes)
		}
	}
}

func written(t *testing.T, ctx context.Context, g *vm.Guest) blockStats {
	t.Helper()
	var all []blockStats
	vmtest.Must(t, g.VM().QMP().Execute(ctx, "query-blockstats", nil, &all))
	for _, s := range all {
		if strings.Contains(s.Device, sandbox.DiskID("data")) {
			return s
		}
	}
	t.Fatalf("no disk data among %+v", all)
	return blockStats{}
}

// writtenIsThere replays the journal, as the next mount would, and reads the file out of the image:
// every block must be the writer's, and there must be at least so many bytes.
func writtenIsThere(t *testing.T, v *vm.Volume, least uint64) {
	_, err := vm.Repair(vmtest.Limited(t), v.Path)
	vmtest.Must(t, err)
	fsck, err := vm.Check(vmtest.Limited(t), "ext4", v.Path)
	vmtest.Must(t, err)
	vmtest.Must(t, fsck.Err("ext4"))
	copied := filepath.Join(t.TempDir(), writtenName)
	out, err := exec.CommandContext(vmtest.Limited(t), "debugfs", "-R", "dump /"+writtenName+" "+copied, v.Path).CombinedOutput()
	vmtest.Must(t, err)
	got, err := os.ReadFile(copied)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if uint64(len(got)) < least {
		t.Errorf("bytes in the file\nwant %d or more\ngot  %d", least, len(got))
	}
	want := make([]byte, blockBytes)
	for i := 0; (i+1)*blockBytes <= len(got); i++ {
		if remote.Fill(want, 1, uint64(i)); !bytes.Equal(got[i*blockBytes:(i+1)*blockBytes], want) {
			t.Fatalf("block %d is another", i)
		}
	}
}
