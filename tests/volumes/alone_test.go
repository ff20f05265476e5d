package volumes

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/guestpath"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// unending are kernel options that the shared guest cannot have: the guest stays after its sandbox
// is destroyed, and a resize waits for its device until its caller gives up.
const unending = "agent.directvol.poweroff=off agent.directvol.resize_wait=1h"

// alone is the shipped image, booted with a disk on the root bus.
//
//	pcie.0 ─┬─ 02  bridge b1
//	        └─ 11  virtio-blk, ext4: PCI path 11
type alone struct {
	*vm.Guest
	image   string // image of the boot disk
	storage *agentpb.Storage
}

// The subtests share this boot. They end a guest or need special options. Their order matters: the
// last one ends the guest.
func TestShippedGuest(t *testing.T) {
	image, err := vm.Scratch(limited(t), t.TempDir(), "ext4", int64(disks["ext4"]))
	must(t, err)
	g := vmtest.Boot(t, vm.Options{Shipped: true, Append: unending, BootDisks: []qemu.Disk{{ID: "boot", Path: image}}})
	disk, _ := g.VM().Disk("boot")
	mountPoint, err := guestpath.Of(disk.PCIPath)
	must(t, err)
	a := &alone{g, image, &agentpb.Storage{Driver: "blk", Source: disk.PCIPath, Fstype: "ext4", MountPoint: mountPoint}}
	for _, step := range []struct {
		name string
		test func(*testing.T, *alone)
	}{
		{"nobody in it obeys tests", nobodyActs},
		{"a disk on the root bus is mounted", bootDiskIsMounted},
		{"a resize waits for its device", resizeWaits},
		{"a shared storage outlives its container", sharedStorageStays},
		{"DestroySandbox unmounts everything, and again", destroyUnmounts},
		{"a guest that does not power off is killed, and the error says so", lateGuestIsKilled},
	} {
		if !t.Run(step.name, func(t *testing.T) { step.test(t, a) }) {
			return
		}
	}
}

func nobodyActs(t *testing.T, a *alone) {
	if _, err := a.Remote.ReadFile(limited(t), "/init"); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("vsock port %d\nwant it refused\ngot  %v", remote.Port, err)
	}
}

func bootDiskIsMounted(t *testing.T, a *alone) {
	if want := "11"; a.storage.Source != want {
		t.Errorf("PCI path\nwant %s\ngot  %s", want, a.storage.Source)
	}
	must(t, container(t, a.Guest, "on-root-bus", a.storage))
	a.isHealthy(t)
}

func (a *alone) stats(t *testing.T) *agentpb.VolumeStatsResponse {
	t.Helper()
	answer, err := a.Agent().GetVolumeStats(limited(t), a.storage.MountPoint)
	must(t, err)
	return answer
}

func (a *alone) isHealthy(t *testing.T) {
	t.Helper()
	if c := a.stats(t).VolumeCondition; c.Abnormal {
		t.Errorf("condition: %v", c)
	}
}

// resizeWaits grows the disk in QEMU after the agent has received ResizeVolume: an agent that
// answers a later call has read the earlier one.
func resizeWaits(t *testing.T, a *alone) {
	before := a.stats(t).Usage[0].Total
	goal := 2 * disks["ext4"]
	request, err := (&agentpb.ResizeVolumeRequest{VolumeGuestPath: a.storage.MountPoint, Size_: goal}).Marshal()
	must(t, err)
	w := dialWire(t, a.Guest)
	w.send(call(t, 1, agentpb.AgentServiceName, "ResizeVolume", request))
	w.send(call(t, 3, agentpb.HealthServiceName, "Check", nil))
	if stream, err := w.answer(); stream != 3 || err != nil {
		t.Fatalf("want Check answered while ResizeVolume waits\ngot  stream %d, %v", stream, err)
	}
	must(t, a.VM().ResizeDisk(limited(t), "boot", goal))
	if stream, err := w.answer(); stream != 1 || err != nil {
		t.Fatalf("want ResizeVolume answered when its device has grown\ngot  stream %d, %v", stream, err)
	}
	if after := a.stats(t).Usage[0].Total; after < before+before/2 {
		t.Errorf("bytes in all\nwant about twice %d\ngot  %d", before, after)
	}
}

func sharedStorageStays(t *testing.T, a *alone) {
	remove(t, a.Guest, "on-root-bus")
	a.storage.Shared = true
	must(t, container(t, a.Guest, "sharing", a.storage))
	remove(t, a.Guest, "sharing")
	a.isHealthy(t)
}

func destroyUnmounts(t *testing.T, a *alone) {
	v, err := a.Volume(limited(t), "beside", "xfs", int64(disks["xfs"]))
	must(t, err)
	must(t, v.Mount(limited(t)))
	for range 2 {
		must(t, a.Agent().DestroySandbox(limited(t)))
	}
	for _, path := range []string{a.storage.MountPoint, v.GuestPath} {
		_, err := a.Agent().GetVolumeStats(limited(t), path)
		refused(t, err, codes.NotFound, path)
	}
	refused(t, container(t, a.Guest, "afterwards", a.storage), codes.FailedPrecondition, "destroyed")
	must(t, a.Agent().CreateSandbox(limited(t), &agentpb.CreateSandboxRequest{SandboxId: "anew"}))
	must(t, container(t, a.Guest, "afterwards", a.storage))
	must(t, a.Agent().DestroySandbox(limited(t)))
	must(t, v.Detach(limited(t)))
	fsck, err := vm.Check(limited(t), "xfs", v.Path)
	must(t, err)
	must(t, fsck.Err("xfs"))
}

func lateGuestIsKilled(t *testing.T, a *alone) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := a.Stop(ctx); err == nil || !strings.Contains(err.Error(), "killed") || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want an error that says it was killed, and why\ngot  %v", err)
	}
	select {
	case <-a.VM().Done():
	default:
		t.Error("the VM still runs")
	}
	// The guest was killed while nothing was mounted, so there is no journal to replay.
	fsck, err := vm.Check(limited(t), "ext4", a.image)
	must(t, err)
	must(t, fsck.Err("ext4"))
}
