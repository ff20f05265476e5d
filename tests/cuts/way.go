package cuts

import (
	"context"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// way says who mounts and grows volumes, and with which measures.
type way struct {
	agent   bool // the agent, with its own measures; otherwise a plain mount(2) and ioctl, with:
	freeze  bool // a freeze after each growth
	remount bool // each mount is made twice
}

// ways are all ways, by name.
var ways = map[string]way{
	"agent":          {agent: true},
	"bare":           {},
	"freeze":         {freeze: true},
	"remount":        {remount: true},
	"freeze+remount": {freeze: true, remount: true},
}

// disk is an image in a guest, as a volume that is mounted in one of the ways.
type disk struct {
	way
	guest            *vm.Guest
	id, fstype, path string

	kept    uint64 // what a mapping leaves out at the disk's beginning; 0 without one
	device  string // its /dev name, if no agent looks for the disk
	mounted string // the mount point
}

// attach attaches the disk to the guest.
func (d *disk) attach(ctx context.Context) error {
	if d.agent {
		err := d.guest.Attach(ctx, sandbox.Volume{ID: d.id, Path: d.path, FSType: d.fstype})
		if err == nil && d.kept > 0 {
			err = d.stack(ctx)
		}
		return err
	}
	_, err := d.guest.VM().AttachDisk(ctx, qemu.Disk{ID: d.id, Path: d.path, Serial: d.id})
	return err
}

// diskID returns the id of the disk in the machine.
func (d *disk) diskID() string {
	if d.agent {
		return sandbox.DiskID(d.id)
	}
	return d.id
}

// mount mounts the attached disk.
func (d *disk) mount(ctx context.Context) (err error) {
	if d.kept > 0 {
		return d.mountMapped(ctx)
	}
	if d.agent {
		d.mounted, err = d.guest.Mount(ctx, d.id)
		return err
	}
	if d.device, err = d.guest.DeviceOf(ctx, d.id); err != nil {
		return err
	}
	d.mounted = "/run/cuts/" + d.id
	if err := d.guest.Remote.Mkdir(ctx, d.mounted, 0o755); err != nil {
		return err
	}
	m := remote.Mount{Source: d.device, Target: d.mounted, FSType: d.fstype}
	if d.remount {
		if err := d.guest.Remote.Mount(ctx, m); err != nil {
			return err
		}
		if err := d.guest.Remote.Unmount(ctx, d.mounted, 0); err != nil {
			return err
		}
	}
	return d.guest.Remote.Mount(ctx, m)
}

// grow grows the disk and the mounted filesystem on it.
func (d *disk) grow(ctx context.Context, bytes uint64) error {
	if d.kept > 0 {
		return d.growMapped(ctx, bytes)
	}
	if d.agent {
		return d.guest.Sandbox.Resize(ctx, d.id, bytes)
	}
	if err := d.guest.VM().ResizeDisk(ctx, d.id, bytes); err != nil {
		return err
	}
	err := vm.Again(ctx, func() (bool, error) {
		size, err := d.guest.Remote.DeviceSize(ctx, d.device)
		return size >= bytes, err
	})
	if err != nil {
		return err
	}
	if _, err := d.guest.Remote.Grow(ctx, remote.Grow{Path: d.mounted, FSType: d.fstype, Bytes: bytes}); err != nil || !d.freeze {
		return err
	}
	return d.guest.Remote.Freeze(ctx, d.mounted)
}

func (d *disk) unmount(ctx context.Context) error {
	if d.kept > 0 {
		return d.unmountMapped(ctx)
	}
	if d.agent {
		return d.guest.Unmount(ctx, d.id)
	}
	return d.guest.Remote.Unmount(ctx, d.mounted, 0)
}

// detach detaches the disk, which must not be mounted.
func (d *disk) detach(ctx context.Context) error {
	if d.kept > 0 {
		if err := d.unstack(ctx); err != nil {
			return err
		}
	}
	if d.agent {
		return d.guest.Detach(ctx, d.id)
	}
	return d.guest.VM().DetachDisk(ctx, d.id)
}
