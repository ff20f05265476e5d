package volumes

import (
	"context"
	"testing"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// The main job: every block that was acknowledged to the writer is there afterwards, although the
// volume grew under the writer, and more was written than the volume could hold before.
func TestVolumeGrowsUnderItsWriter(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		isHealthy(t, v)
		before := sizes(t, v)
		if before.DeviceBytes != disks[fstype] {
			t.Fatalf("device\nwant %d bytes\ngot  %d", disks[fstype], before.DeviceBytes)
		}
		ctx := within(t, jobLimit)
		writer, err := v.StartWriter(ctx, 0)
		must(t, err)
		must(t, writer.Await(ctx, 8*miB))
		goal := 2 * disks[fstype]
		must(t, v.Resize(ctx, goal))
		after := sizes(t, v)
		if after.DeviceBytes != goal || after.FSBytes <= before.DeviceBytes {
			t.Errorf("after growing to %d bytes\nwant a filesystem larger than the device was, %d\ngot  %+v", goal, before.DeviceBytes, after)
		}
		must(t, writer.Await(ctx, before.DeviceBytes+miB))
		must(t, writer.Stop(ctx))
		isHealthy(t, v)
		freshlyVerified(t, v, writer.Ledger().Bytes())
	})
}

// freshlyVerified reads the acknowledged blocks from the disk, and not from the page cache.
func freshlyVerified(t *testing.T, v *vm.Volume, want uint64) {
	t.Helper()
	ctx := within(t, jobLimit)
	must(t, v.Unmount(ctx))
	must(t, v.Mount(ctx))
	got, err := v.Verify(ctx, nil)
	must(t, err)
	if got != want {
		t.Errorf("bytes acknowledged and equal\nwant %d\ngot  %d", want, got)
	}
}

func TestStatsAreTheKernelsNumbers(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		ctx := limited(t)
		must(t, g.Remote.WriteFile(ctx, v.GuestPath+"/file", make([]byte, 3*miB)))
		must(t, g.Remote.Mkdir(ctx, v.GuestPath+"/a/b/c", 0o755))
		must(t, g.Remote.Sync(ctx, v.GuestPath))
		fs := statFS(t, g, v.GuestPath)
		block := uint64(fs.BlockSize)
		reserved := fs.Free - fs.Available
		if (reserved > 0) != (fstype != "xfs") {
			t.Errorf("%d blocks are reserved for root, or for metadata: this test shows less than it should", reserved)
		}
		want := map[agentpb.VolumeUsage_Unit]agentpb.VolumeUsage{
			agentpb.VolumeUsage_BYTES:  {Total: fs.Blocks * block, Used: (fs.Blocks - fs.Free) * block, Available: fs.Available * block},
			agentpb.VolumeUsage_INODES: {Total: fs.Files, Used: fs.Files - fs.FilesFree, Available: fs.FilesFree},
		}
		if fstype == "btrfs" { // it has no number of inodes
			delete(want, agentpb.VolumeUsage_INODES)
		}
		usages := stats(t, v).Usage
		if len(usages) != len(want) {
			t.Fatalf("want %d usages\ngot  %v", len(want), usages)
		}
		for _, got := range usages {
			w := want[got.Unit]
			if got.Total != w.Total || got.Used != w.Used || got.Available != w.Available {
				t.Errorf("%v\nwant %d, %d used, %d available\ngot  %d, %d, %d", got.Unit, w.Total, w.Used, w.Available, got.Total, got.Used, got.Available)
			}
		}
	})
}

// A mount that belongs to no Storage is a volume, too.
func TestStatsOfAForeignMount(t *testing.T) {
	g := guest(t)
	path := tmpfs(t, g, "/run/test/foreign")
	answer, err := g.Agent().GetVolumeStats(limited(t), path)
	must(t, err)
	if total := answer.Usage[0].Total; total != miB || answer.VolumeCondition.Abnormal {
		t.Errorf("\nwant %d bytes, healthy\ngot  %d, %v", miB, total, answer.VolumeCondition)
	}
}

// tmpfs mounts a tmpfs of 1 MiB without the agent's knowledge.
func tmpfs(t *testing.T, g *vm.Guest, path string) string {
	t.Helper()
	ctx := limited(t)
	must(t, g.Remote.Mkdir(ctx, path, 0o755))
	must(t, g.Remote.Mount(ctx, remote.Mount{Source: "tmpfs", Target: path, FSType: "tmpfs", Data: "size=1m"}))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := g.Remote.Unmount(ctx, path, 0); err != nil {
			t.Error(err)
		}
	})
	return path
}
