package experiments

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

// shareName is the tag, the device and the chardev of the shared folder.
const shareName = "shared"

// share mounts a folder of the host in the guest at sharedPath, by virtio-fs. end removes it.
func (l *Setup) share(ctx context.Context, guest *vm.Guest) (end func(context.Context) error, err error) {
	program, err := vm.FindVirtiofsd()
	if err != nil {
		return nil, measure.Unavailable("%v", err)
	}
	folder, err := os.MkdirTemp(guest.Dir, "shared-") // on the same filesystem as the volume's image
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(l.dir, "virtiofsd.sock")
	daemon, err := vm.StartVirtiofsd(program, folder, socket)
	if err != nil {
		return nil, err
	}
	l.atEnd = append(l.atEnd, daemon.Stop)
	if err := plugShare(ctx, guest, socket); err != nil {
		daemon.Stop()
		return nil, fmt.Errorf("%w\n%s", err, daemon.Said())
	}
	return func(ctx context.Context) error {
		defer daemon.Stop() // QEMU has released it by then, or is about to be killed
		defer os.RemoveAll(folder)
		return unplugShare(ctx, guest)
	}, nil
}

// The PCI place of the device: the last slot of the last bridge, which a disk gets only when no
// other is free.
const shareBus, shareSlot = "b2", "0x1e"

// plugShare adds the device to the guest, with a line interrupt like the guest's disks, and mounts
// it.
func plugShare(ctx context.Context, guest *vm.Guest, socket string) error {
	for _, command := range []struct {
		name      string
		arguments any
	}{
		{"chardev-add", map[string]any{"id": shareName, "backend": map[string]any{"type": "socket", "data": map[string]any{
			"server": false, "addr": map[string]any{"type": "unix", "data": map[string]any{"path": socket}},
		}}}},
		{"device_add", map[string]any{"driver": "vhost-user-fs-pci", "id": shareName, "chardev": shareName, "tag": shareName, "bus": shareBus, "addr": shareSlot, "vectors": 0}},
	} {
		if err := guest.VM().QMP().Execute(ctx, command.name, command.arguments, nil); err != nil {
			return err
		}
	}
	if err := guest.Remote.Mkdir(ctx, sharedPath, 0o755); err != nil {
		return err
	}
	return mountSoon(ctx, guest, remote.Mount{Source: shareName, Target: sharedPath, FSType: "virtiofs"})
}

// mountSoon mounts a filesystem that the guest will know about in a moment.
func mountSoon(ctx context.Context, guest *vm.Guest, m remote.Mount) error {
	for {
		err := guest.Remote.Mount(ctx, m)
		if !errors.Is(err, syscall.EINVAL) { // virtio-fs's error for an unknown tag
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w (%w)", ctx.Err(), err)
		}
	}
}

// unplugShare unmounts the share and removes the device.
func unplugShare(ctx context.Context, guest *vm.Guest) error {
	if err := guest.Remote.Unmount(ctx, sharedPath, 0); err != nil {
		return err
	}
	qmp := guest.VM().QMP()
	deleted := qmp.Subscribe("DEVICE_DELETED")
	defer deleted.Close()
	if err := qmp.Execute(ctx, "device_del", map[string]any{"id": shareName}, nil); err != nil {
		return err
	}
	for {
		select {
		case event, ok := <-deleted.Events():
			if !ok || bytes.Contains(event.Data, []byte(`"`+shareName+`"`)) {
				return qmp.Execute(ctx, "chardev-remove", map[string]any{"id": shareName}, nil)
			}
		case <-ctx.Done():
			return fmt.Errorf("the guest does not release virtio-fs: %w", ctx.Err())
		}
	}
}
