package storage

import (
	"context"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount"
)

// driver implements one value of Storage.driver.
type driver struct {
	name string
	// device is set if the storage has a block device, which the host plugs in.
	device bool
	// volume is set if the storage is a mount, which can be measured and is watched.
	volume bool
	// check refuses a request that can never be right for this driver.
	check func(request) error
	// find returns the origin that the request's source names. It waits until ctx ends for a device
	// that does not exist yet.
	find func(context.Context, request) (origin, error)
	// mount makes the storage at its mount point. It waits for other calls until ctx ends, and for
	// the disk without a limit.
	mount func(context.Context, *devices, request, origin) (did, error)
	// unmount undoes mount. It refuses a storage that is in use.
	unmount func(*mounted) error
	// couldGo refuses a storage that unmount would refuse, or whose disk does not answer: unmount
	// would take that one out of sight before it waits for the disk. If other mounts are nested in
	// the storage, the kernel cannot say whether it is in use until they are gone. couldGo is nil
	// if unmount never has to wait.
	couldGo func(ctx context.Context, t *Table, m *mounted, nested bool) error
	// there reports whether the storage that mount has made exists and is visible to its users.
	there func(*mounted) (bool, error)
}

// did is the result of a driver's mount.
type did struct {
	made  bool // the mount point's directory was made
	found bool // nothing was mounted: the same mount existed already
}

// drivers are all drivers, one per file, with the names that Kata gives them.
var drivers = []*driver{blk, scsi, ephemeral, local, virtioFS}

// Drivers returns the values of Storage.driver that this agent knows.
func Drivers() []string { return namesOf(func(*driver) bool { return true }) }

// DeviceDrivers returns the values of Drivers that mount a block device.
func DeviceDrivers() []string { return namesOf(func(d *driver) bool { return d.device }) }

func namesOf(matches func(*driver) bool) (names []string) {
	for _, d := range drivers {
		if matches(d) {
			names = append(names, d.name)
		}
	}
	return names
}

// driverOf returns the driver with a name, or nil.
func driverOf(name string) *driver {
	for _, d := range drivers {
		if d.name == name {
			return d
		}
	}
	return nil
}

// origin is what a storage is mounted from: a block device or, if device is zero, the source that
// path names, such as a virtio-fs tag.
type origin struct {
	path   string // the device's node, or the source in mountinfo
	device mount.Device
}

// same reports whether two origins are the same.
func (o origin) same(p origin) bool { return o.path == p.path && o.device.Same(p.device) }

// deviceOrigin returns the origin of a block device.
func deviceOrigin(d blockdev.Device, err error) (origin, error) {
	return origin{d.Path, mount.Device{Number: d.Number, Seq: d.Seq}}, err
}

// named is the find function of drivers without a block device.
func named(_ context.Context, r request) (origin, error) { return origin{path: r.source}, nil }
