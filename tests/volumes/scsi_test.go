package volumes

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/vm"
)

// execute has QEMU do something, and undo it when the test ends.
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

// unplug takes a PCI device away, and waits until the guest has let go of it.
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
			return fmt.Errorf("the guest does not let go of %s: %w", id, ctx.Err())
		}
	}
}

// A disk behind a SCSI controller is found by its address, and grows, whether
// the controller tells the guest of it or not.
//
//	b2 ── 1d  virtio-scsi controller ── target 3, unit 7: a disk
func TestSCSIDiskIsAVolume(t *testing.T) {
	for name, tells := range map[string]string{"a controller that tells": "on", "a controller that is asked": "off"} {
		t.Run(name, func(t *testing.T) {
			g := guest(t)
			leavesNoMount(t, g)
			const controller, disk, node = "controller", "scsidisk", "scsinode"
			execute(t, g, "device_add", map[string]any{
				"driver": "virtio-scsi-pci", "id": controller, "bus": "b2", "addr": "0x1d", "vectors": 0, "num_queues": 1, "hotplug": tells, "param_change": tells,
			}, func(ctx context.Context) error { return unplug(ctx, g, controller) })
			image, err := vm.Scratch(limited(t), t.TempDir(), "ext4", int64(disks["ext4"]))
			must(t, err)
			execute(t, g, "blockdev-add", map[string]any{"driver": "raw", "node-name": node, "file": map[string]any{"driver": "file", "filename": image}},
				func(ctx context.Context) error {
					return g.VM().QMP().Execute(ctx, "blockdev-del", map[string]any{"node-name": node}, nil)
				})
			storage := &agentpb.Storage{Driver: "scsi", Source: "3:7", Fstype: "ext4", MountPoint: "/run/test/scsi"}
			absent := *storage
			absent.Source = "3:8"
			// After this the guest knows the controller, and has looked for disks.
			refused(t, container(t, g, "scsi", &absent), codes.DeadlineExceeded, "3:8")
			execute(t, g, "device_add", map[string]any{"driver": "scsi-hd", "id": disk, "bus": controller + ".0", "channel": 0, "scsi-id": 3, "lun": 7, "drive": node},
				func(ctx context.Context) error { return unplug(ctx, g, disk) })
			must(t, container(t, g, "scsi", storage))
			if line := mountLine(t, g, storage.MountPoint); !strings.Contains(line, "- ext4 /dev/sd") {
				t.Errorf("want ext4 of a SCSI disk\ngot  %s", line)
			}
			goal := 2 * disks["ext4"]
			must(t, g.VM().QMP().Execute(limited(t), "block_resize", map[string]any{"node-name": node, "size": goal}, nil))
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
