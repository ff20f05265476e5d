package volumes

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

func remove(t *testing.T, g *vm.Guest, id string) {
	t.Helper()
	must(t, g.Agent().RemoveContainer(limited(t), id))
}

func TestContainersMayBeMadeAndRemovedAgain(t *testing.T) {
	g := guest(t)
	_, storage := attached(t, g, "ext4")
	for range 2 {
		must(t, container(t, g, "again", storage))
	}
	if n := strings.Count(vmtest.Mounts(t, g), " "+storage.MountPoint+" "); n != 1 {
		t.Errorf("mounts of a storage that was asked for twice\nwant 1\ngot  %d", n)
	}
	for range 2 {
		remove(t, g, "again")
	}
	if vmtest.IsMounted(t, g, storage.MountPoint) {
		t.Error("it is still mounted though its container was removed")
	}
	remove(t, g, "never-made")
}

func TestStorageStaysForItsLastContainer(t *testing.T) {
	g := guest(t)
	_, storage := attached(t, g, "xfs")
	must(t, container(t, g, "first", storage))
	must(t, container(t, g, "second", storage))
	remove(t, g, "first")
	if !vmtest.IsMounted(t, g, storage.MountPoint) {
		t.Error("it was unmounted from under the second container")
	}
	remove(t, g, "second")
	if vmtest.IsMounted(t, g, storage.MountPoint) {
		t.Error("it is still mounted though nobody holds it")
	}
}

func TestContainerMayHaveManyStorages(t *testing.T) {
	g := guest(t)
	_, outer := attached(t, g, "ext4")
	_, inner := attached(t, g, "xfs")
	_, other := attached(t, g, "ext4")
	inner.MountPoint = outer.MountPoint + "/inner" // removed first, although mounted last
	must(t, container(t, g, "many", outer, inner, other))
	for _, s := range []*agentpb.Storage{outer, inner, other} {
		if !vmtest.IsMounted(t, g, s.MountPoint) {
			t.Errorf("%s is not mounted", s.MountPoint)
		}
	}
	remove(t, g, "many")
	for _, s := range []*agentpb.Storage{outer, inner, other} {
		if vmtest.IsMounted(t, g, s.MountPoint) {
			t.Errorf("%s is still mounted", s.MountPoint)
		}
	}
}

// Neither a mount nor a disk is removed while it is in use, and the refused call succeeds when the
// user has ended.
func TestVolumeInUseIsNotTakenAway(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		ctx := within(t, jobLimit)
		writer, err := v.StartWriter(ctx, 0)
		must(t, err)
		must(t, writer.Await(ctx, miB))
		refused(t, v.Unmount(ctx), codes.FailedPrecondition, v.GuestPath, "in use")
		refused(t, v.Detach(ctx), codes.FailedPrecondition, v.GuestPath, "in use")
		if _, ok := g.VM().Disk(v.DiskID()); !ok {
			t.Error("its disk was detached all the same")
		}
		isHealthy(t, v)
		must(t, writer.Await(ctx, writer.Ledger().Bytes()+miB))
		must(t, writer.Stop(ctx))
		freshlyVerified(t, v, writer.Ledger().Bytes())
	})
}

func TestFailedContainerLeavesNothing(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	_, good := attached(t, g, "ext4")
	_, bad := attached(t, g, "xfs")
	bad.Fstype = "ext4"
	refused(t, container(t, g, "unwound", good, bad), codes.InvalidArgument, bad.MountPoint)
	if vmtest.IsMounted(t, g, good.MountPoint) {
		t.Error("the first storage is still mounted though the second failed")
	}
	// Only the mounts that the call itself has added are undone.
	must(t, container(t, g, "unwound", good))
	refused(t, container(t, g, "unwound", good, bad), codes.InvalidArgument)
	if !vmtest.IsMounted(t, g, good.MountPoint) {
		t.Error("a storage that the container had before was unmounted")
	}
	remove(t, g, "unwound")
}

func TestDevicePathIsASource(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "xfs")
	device := sizes(t, v).Device
	must(t, v.Unmount(limited(t)))
	storage := &agentpb.Storage{Driver: "blk", Source: device, Fstype: "xfs", MountPoint: "/run/test/by-device"}
	must(t, container(t, g, "by-device", storage))
	answer, err := g.Agent().GetVolumeStats(limited(t), storage.MountPoint)
	must(t, err)
	if fs := statFS(t, g, storage.MountPoint); answer.Usage[0].Total != fs.Blocks*uint64(fs.BlockSize) {
		t.Errorf("bytes in all\nwant %d\ngot  %d", fs.Blocks*uint64(fs.BlockSize), answer.Usage[0].Total)
	}
	remove(t, g, "by-device")
}

func TestMountOptionsReachTheKernel(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4", "noatime", "nodev", "data=journal", "_netdev")
	for line := range strings.Lines(vmtest.Mounts(t, g)) {
		if strings.Contains(line, " "+v.GuestPath+" ") {
			for _, option := range []string{"noatime", "nodev", "data=journal"} {
				if !strings.Contains(line, option) {
					t.Errorf("want %s\ngot  %s", option, line)
				}
			}
			return
		}
	}
	t.Errorf("%s is not mounted", v.GuestPath)
}

// Another program may unmount the agent's mounts. The agent notices that, and does not require the
// mount.
func TestVolumeUnmountedBehindTheAgentsBack(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4")
	isHealthy(t, v)
	must(t, g.Remote.Unmount(limited(t), v.GuestPath, 0))
	_, err := g.Agent().GetVolumeStats(limited(t), v.GuestPath)
	refused(t, err, codes.InvalidArgument, v.GuestPath)
	must(t, v.Unmount(limited(t)))
	must(t, v.Mount(limited(t)))
	isHealthy(t, v)
}

func TestOccupiedMountPointIsRefused(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	_, first := attached(t, g, "ext4")
	_, second := attached(t, g, "ext4")
	second.MountPoint = first.MountPoint
	must(t, container(t, g, "first", first))
	refused(t, container(t, g, "second", second), codes.AlreadyExists, first.MountPoint)
	remove(t, g, "second")
	if !vmtest.IsMounted(t, g, first.MountPoint) {
		t.Error("the first was unmounted")
	}
	remove(t, g, "first")
}

func TestMountPointOfSomeoneElseIsRefused(t *testing.T) {
	g := guest(t)
	_, storage := attached(t, g, "ext4")
	storage.MountPoint = tmpfs(t, g, "/run/test/taken")
	refused(t, container(t, g, "taken", storage), codes.AlreadyExists, storage.MountPoint, "tmpfs")
}

// The same device at the same mount point is what the call asks for, whoever mounted it. An agent
// after a restart finds its volumes like this.
func TestMountOfTheSameDeviceIsTakenOver(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4")
	device, path := sizes(t, v).Device, v.GuestPath
	must(t, v.Unmount(limited(t)))
	ctx := limited(t)
	must(t, g.Remote.Mkdir(ctx, path, 0o755))
	must(t, g.Remote.Mount(ctx, remote.Mount{Source: device, Target: path, FSType: "ext4"}))
	must(t, v.Mount(ctx))
	isHealthy(t, v)
	must(t, v.Unmount(ctx))
	if vmtest.IsMounted(t, g, path) {
		t.Error("it is still mounted")
	}
}
