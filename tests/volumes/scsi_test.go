package volumes

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/rootfs/kernel"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// scsiController is the id of the virtio-scsi controller in the tests below, until the test that
// called plugController ends.
const scsiController = "controller"

// plugController attaches a virtio-scsi controller until the test ends. With tells set, the
// controller announces new disks and grown disks to the guest.
func plugController(t *testing.T, g *vm.Guest, tells bool) {
	t.Helper()
	execute(t, g, "device_add", map[string]any{
		"driver": "virtio-scsi-pci", "id": scsiController, "bus": "b2", "addr": "0x1d", "vectors": 0, "num_queues": 1, "hotplug": tells, "param_change": tells,
	}, func(ctx context.Context) error { return unplug(ctx, g, scsiController) })
}

// nodeOf returns the name of a SCSI disk's block node.
func nodeOf(id string) string { return id + "node" }

// plugSCSI attaches an image to the controller. The end of the test removes its block node, and
// unplug removes the disk.
func plugSCSI(t *testing.T, g *vm.Guest, id, image, serial string, target, unit int) {
	t.Helper()
	execute(t, g, "blockdev-add", map[string]any{"driver": "raw", "node-name": nodeOf(id), "file": map[string]any{"driver": "file", "filename": image}},
		func(ctx context.Context) error {
			return g.VM().QMP().Execute(ctx, "blockdev-del", map[string]any{"node-name": nodeOf(id)}, nil)
		})
	device := map[string]any{"driver": "scsi-hd", "id": id, "bus": scsiController + ".0", "channel": 0, "scsi-id": target, "lun": unit, "drive": nodeOf(id)}
	if serial != "" {
		device["serial"] = serial
	}
	must(t, g.VM().QMP().Execute(limited(t), "device_add", device, nil))
}

// execute runs a QMP command, and undoes it at the test's end.
func execute(t *testing.T, g *vm.Guest, command string, arguments map[string]any, undo func(context.Context) error) {
	t.Helper()
	must(t, g.VM().QMP().Execute(limited(t), command, arguments, nil))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := undo(ctx); err != nil {
			t.Errorf("undo %s: %v", command, err)
		}
	})
}

// unplug detaches a PCI device, and waits until the guest has released it.
func unplug(ctx context.Context, g *vm.Guest, id string) error {
	deleted := g.VM().QMP().Subscribe("DEVICE_DELETED")
	defer deleted.Close()
	if err := g.VM().QMP().Execute(ctx, "device_del", map[string]any{"id": id}, nil); err != nil {
		return err
	}
	for {
		select {
		case event, ok := <-deleted.Events():
			if !ok || strings.Contains(string(event.Data), `"device":"`+id+`"`) || strings.Contains(string(event.Data), `"device": "`+id+`"`) {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("the guest does not release %s: %w", id, ctx.Err())
		}
	}
}

// The agent finds a disk behind a SCSI controller by its address and grows it, whether or not the
// controller announces changes to the guest.
//
//	b2 ── 1d  virtio-scsi controller ── target 3, unit 7: a disk
func TestSCSIDiskIsAVolume(t *testing.T) {
	for name, tells := range map[string]bool{"a controller that tells": true, "a controller that is asked": false} {
		t.Run(name, func(t *testing.T) {
			g := guest(t)
			leavesNoMount(t, g)
			const disk = "scsidisk"
			plugController(t, g, tells)
			image, err := vm.Scratch(limited(t), t.TempDir(), "ext4", int64(disks["ext4"]))
			must(t, err)
			storage := &agentpb.Storage{Driver: "scsi", Source: "3:7", Fstype: "ext4", MountPoint: "/run/test/scsi"}
			absent := *storage
			absent.Source = "3:8"
			// After this call the guest knows the controller, and has scanned for disks.
			refused(t, container(t, g, "scsi", &absent), codes.DeadlineExceeded, "3:8")
			plugSCSI(t, g, disk, image, "", 3, 7)
			t.Cleanup(func() { unplugAtEnd(t, g, disk) })
			must(t, container(t, g, "scsi", storage))
			if line := mountLine(t, g, storage.MountPoint); !strings.Contains(line, "- ext4 /dev/sd") {
				t.Errorf("want ext4 of a SCSI disk\ngot  %s", line)
			}
			goal := 2 * disks["ext4"]
			must(t, g.VM().QMP().Execute(limited(t), "block_resize", map[string]any{"node-name": nodeOf(disk), "size": goal}, nil))
			must(t, g.Agent().ResizeVolume(limited(t), storage.MountPoint, goal))
			answer, err := g.Agent().GetVolumeStats(limited(t), storage.MountPoint)
			must(t, err)
			if total := answer.Usage[0].Total; total <= disks["ext4"] || answer.VolumeCondition.Abnormal {
				t.Errorf("after growing to %d bytes: %d, %v", goal, total, answer.VolumeCondition)
			}
			must(t, g.Agent().RemoveContainer(limited(t), "scsi"))
		})
	}
}

// A SCSI address refers to the virtio-scsi controller: the agent ignores a disk with that address
// behind another controller. The disk must also have the expected serial, in full, because SCSI
// does not shorten serials as virtio does.
//
//	b2 ── 1d  virtio-scsi controller ── target 0, unit 0: a disk with serial "…another", then one with "…promised"
//	scsi_debug, another controller   ── target 0, unit 0: a disk in the guest's memory
func TestSCSIDiskIsThePromisedOneOfTheVirtioController(t *testing.T) {
	const prefix = "pvc-4a0e7e42-5a14-4d0c-"
	g := guest(t)
	leavesNoMount(t, g)
	other := plugOtherController(t, g)
	plugController(t, g, true)
	image, clone := scratch(t, "ext4")
	storage := &agentpb.Storage{Driver: "scsi", Source: "0:0", Fstype: "ext4", MountPoint: "/run/test/scsi", DriverOptions: []string{"serial=" + prefix + "promised"}}
	unnamed := *storage
	unnamed.DriverOptions = nil
	refused(t, container(t, g, "scsi", &unnamed), codes.DeadlineExceeded, "0:0")
	plugSCSI(t, g, "another", image, prefix+"another", 0, 0)
	refused(t, container(t, g, "scsi", storage), codes.FailedPrecondition, `"`+prefix+`another"`, `"`+prefix+`promised"`)
	if vmtest.IsMounted(t, g, storage.MountPoint) {
		t.Error("it was mounted all the same")
	}
	must(t, container(t, g, "scsi", &unnamed)) // a host that states no serial gets the disk that is there
	if line := mountLine(t, g, storage.MountPoint); !strings.Contains(line, "- ext4 /dev/sd") || strings.Contains(line, "/dev/"+other+" ") {
		t.Errorf("want ext4 of a SCSI disk other than %s\ngot  %s", other, line)
	}
	remove(t, g, "scsi")
	must(t, unplug(limited(t), g, "another"))
	plugSCSI(t, g, "promised", clone, prefix+"promised", 0, 0)
	t.Cleanup(func() { unplugAtEnd(t, g, "promised") })
	until(t, func() bool { return container(t, g, "scsi", storage) == nil }) // the guest may keep the previous disk for longer than the agent waits
	remove(t, g, "scsi")
}

// plugOtherController adds a SCSI controller of another kind, with a disk at 0:0, to the guest
// until the test ends, and returns the disk's name.
func plugOtherController(t *testing.T, g *vm.Guest) (disk string) {
	t.Helper()
	const module, control = "scsi_debug", "/sys/bus/pseudo/drivers/scsi_debug/add_host"
	bringModule(t, g, module)
	must(t, g.Agent().CreateSandbox(limited(t), &agentpb.CreateSandboxRequest{SandboxId: "scsi", KernelModules: []*agentpb.KernelModule{{Name: module, Parameters: []string{"add_host=0"}}}}))
	must(t, g.Remote.WriteFile(limited(t), control, []byte("1")))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := g.Remote.WriteFile(ctx, control, []byte("-1")); err != nil {
			t.Error(err)
		}
	})
	until(t, func() bool {
		table, err := g.Remote.ReadFile(limited(t), "/proc/partitions")
		must(t, err)
		for name := range strings.FieldsSeq(string(table)) {
			if strings.HasPrefix(name, "sd") {
				disk = name
			}
		}
		return disk != ""
	})
	return disk
}

// bringModule copies a module of the guest's kernel, which the image lacks, to the place where the
// agent looks for it.
func bringModule(t *testing.T, g *vm.Guest, name string) {
	t.Helper()
	build, err := vm.FindBuild()
	must(t, err)
	from, err := kernel.Open(limited(t), kernel.Source{Cache: filepath.Join(build.Dir, "cache")})
	must(t, err)
	modules, err := from.Order(name)
	must(t, err)
	for _, m := range modules {
		if m.Name != name { // the image has this module
			continue
		}
		data, err := m.Read()
		must(t, err)
		at := path.Join("/lib/modules", from.Version, m.Path)
		must(t, g.Remote.Mkdir(limited(t), path.Dir(at), 0o755))
		must(t, g.Remote.WriteFile(limited(t), at, data))
	}
}
