package storage

import (
	"cmp"
	"context"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/protocols/agentpb"
)

// AwaitDevices waits until a container's devices exist, as Hold does for the devices of storages.
// It fails on the first device that does not appear. A vm_path that names a serial
// (blockdev.SerialIn) promises it, like the option of a storage.
func (t *Table) AwaitDevices(ctx context.Context, devices []*agentpb.Device) error {
	for _, d := range devices {
		if d == nil {
			return errkind.New(errkind.InvalidArgument, "device: empty message")
		}
		driver := driverOf(d.Type)
		if driver == nil || !driver.device {
			return errkind.New(errkind.Unimplemented, "device %.80q: unknown type %.40q, this agent has %v", d.ContainerPath, d.Type, DeviceDrivers())
		}
		source := cmp.Or(d.Id, d.VmPath)
		if source == "" {
			return errkind.New(errkind.InvalidArgument, "device %.80q: it has neither an id nor a vm_path", d.ContainerPath)
		}
		serial, _ := blockdev.SerialIn(d.VmPath)
		if _, err := t.find(ctx, "device "+source, request{driver: driver, source: source, serial: serial}); err != nil {
			return err
		}
	}
	return nil
}
