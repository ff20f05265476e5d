package volumes

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// The slot of the tests below, behind the second bridge, where the host has no disk.
const (
	ownSlot = "03/1c"
	slotBus = "b2"
	slotAt  = "0x1c"
)

// plug puts a disk with a serial into ownSlot. The end of the test removes its block node in QEMU,
// and unplug removes the disk.
func plug(t *testing.T, g *vm.Guest, id, image, serial string) {
	t.Helper()
	execute(t, g, "blockdev-add", map[string]any{"driver": "raw", "node-name": id + "node", "file": map[string]any{"driver": "file", "filename": image}},
		func(ctx context.Context) error {
			return g.VM().QMP().Execute(ctx, "blockdev-del", map[string]any{"node-name": id + "node"}, nil)
		})
	must(t, g.VM().QMP().Execute(limited(t), "device_add", map[string]any{
		"driver": "virtio-blk-pci", "id": id, "bus": slotBus, "addr": slotAt, "drive": id + "node", "serial": serial, "vectors": 0, "disable-legacy": "on",
	}, nil))
}

// scratch makes an image with a filesystem, and a clone of the image with the same UUID.
func scratch(t *testing.T, fstype string) (image, clone string) {
	t.Helper()
	dir := t.TempDir()
	image, err := vm.Scratch(limited(t), dir, fstype, int64(disks[fstype]))
	must(t, err)
	clone = filepath.Join(dir, "clone.img")
	out, err := exec.CommandContext(limited(t), "cp", "--sparse=always", image, clone).CombinedOutput()
	if err != nil {
		t.Fatalf("clone %s: %v: %s", image, err, out)
	}
	return image, clone
}

// The disk in the expected slot has another serial than the expected one: it is not mounted,
// although its filesystem is intact, and the error names both serials. The disk with the expected
// serial is mounted when it appears.
//
//	b2 ── 1c  a virtio disk, first with serial "another", then with serial "promised"
func TestDiskWithAnotherSerialIsNotMounted(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	image, clone := scratch(t, "ext4")
	plug(t, g, "another", image, "another")
	storage := &agentpb.Storage{Driver: "blk", Source: ownSlot, Fstype: "ext4", MountPoint: "/run/test/serial", DriverOptions: []string{"serial=promised"}}
	refused(t, container(t, g, "serial", storage), codes.FailedPrecondition, `"another"`, `"promised"`)
	if vmtest.IsMounted(t, g, storage.MountPoint) {
		t.Error("it was mounted all the same")
	}
	answer := make(chan error, 1)
	go func() {
		ctx := limited(t)
		err := error(status.Error(codes.FailedPrecondition, "not asked yet"))
		for status.Code(err) == codes.FailedPrecondition || status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil { // the swap may take longer than the agent waits
			err = g.Agent().CreateContainer(ctx, &agentpb.CreateContainerRequest{ContainerId: "serial", Storages: []*agentpb.Storage{storage}})
		}
		answer <- err
	}()
	must(t, unplug(limited(t), g, "another"))
	plug(t, g, "promised", clone, "promised")
	t.Cleanup(func() { unplugAtEnd(t, g, "promised") })
	must(t, <-answer)
	remove(t, g, "serial")
}

// unmountBehind unmounts a volume without the agent's knowledge, after its watch has examined it.
func unmountBehind(t *testing.T, g *vm.Guest, path string) {
	t.Helper()
	_, err := g.Agent().GetVolumeStats(limited(t), path)
	must(t, err)
	must(t, g.Remote.Unmount(limited(t), path, 0))
}

func unplugAtEnd(t *testing.T, g *vm.Guest, id string) {
	ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
	defer cancel()
	if err := unplug(ctx, g, id); err != nil {
		t.Error(err)
	}
}

// Another program unmounts a volume. The host puts another disk into the slot, a clone with the
// same UUID, which gets the same name and number. The program mounts the clone at the same mount
// point. The clone does not count as the volume.
//
//	b2 ── 1c  a virtio disk, first the volume, then its clone
func TestDiskSwappedInItsSlotIsAnotherVolume(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		leavesNoMount(t, g)
		image, clone := scratch(t, fstype)
		plug(t, g, "volume", image, "volume")
		storage := &agentpb.Storage{Driver: "blk", Source: ownSlot, Fstype: fstype, MountPoint: "/run/test/swapped"}
		must(t, container(t, g, "swapped", storage))
		was := strings.Fields(mountLine(t, g, storage.MountPoint))
		unmountBehind(t, g, storage.MountPoint)
		must(t, unplug(limited(t), g, "volume"))
		plug(t, g, "clone", clone, "clone")
		t.Cleanup(func() { unplugAtEnd(t, g, "clone") })
		// To mount by hand, the disk must be there, so the agent finds the disk first.
		elsewhere := *storage
		elsewhere.MountPoint = "/run/test/elsewhere"
		must(t, container(t, g, "elsewhere", &elsewhere))
		device := strings.Fields(mountLine(t, g, elsewhere.MountPoint))
		remove(t, g, "elsewhere")
		must(t, g.Remote.Mount(limited(t), remote.Mount{Source: device[len(device)-2], Target: storage.MountPoint, FSType: fstype}))
		is := strings.Fields(mountLine(t, g, storage.MountPoint))
		if was[2] != is[2] {
			t.Errorf("the clone got number %s, and the volume had %s: nothing is shown", is[2], was[2])
		}
		t.Logf("mount %s of disk %s, then mount %s of disk %s", was[0], was[2], is[0], is[2])
		storage.DriverOptions = []string{"serial=volume"}
		refused(t, container(t, g, "swapped", storage), codes.FailedPrecondition, `"volume"`, `"clone"`)
		must(t, g.Agent().RemoveContainer(limited(t), "swapped"))
		if !vmtest.IsMounted(t, g, storage.MountPoint) {
			t.Error("somebody's mount of another disk was unmounted")
		}
		must(t, g.Remote.Unmount(limited(t), storage.MountPoint, 0))
	})
}

// The agent does not wait for a disk that is gone and whose slot another disk has: the source of
// the storage leads to the new disk.
func TestStorageAskedForAgainGetsTheDiskInItsSlot(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	image, clone := scratch(t, "xfs")
	plug(t, g, "left", image, "left")
	storage := &agentpb.Storage{Driver: "blk", Source: ownSlot, Fstype: "xfs", MountPoint: "/run/test/again"}
	must(t, container(t, g, "again", storage))
	unmountBehind(t, g, storage.MountPoint)
	must(t, unplug(limited(t), g, "left"))
	plug(t, g, "came", clone, "came")
	t.Cleanup(func() { unplugAtEnd(t, g, "came") })
	storage.DriverOptions = []string{"serial=came"}
	must(t, container(t, g, "again", storage))
	if !vmtest.IsMounted(t, g, storage.MountPoint) {
		t.Error("OK, and not mounted")
	}
	if _, err := g.Agent().GetVolumeStats(limited(t), storage.MountPoint); err != nil {
		t.Error(fmt.Errorf("statistics: %w", err))
	}
	remove(t, g, "again")
}
