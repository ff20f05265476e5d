package storage

import (
	"context"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount"
)

// driver is what a value of Storage.driver stands for.
type driver struct {
	name string
	// device says that a block device is below, which the host plugs in.
	device bool
	// volume says that something is mounted: it can be measured, and is watched.
	volume bool
	// check refuses a request that can never be right for this driver.
	check func(request) error
	// find returns what the request's source names; it waits until ctx ends for
	// a device that is not there yet.
	find func(context.Context, request) (origin, error)
	// mount makes the storage at its mount point. It waits for other calls until ctx ends,
	// and for the disk as long as that wants.
	mount func(context.Context, *devices, request, origin) (did, error)
	// unmount undoes mount. What is in use is refused.
	unmount func(*mounted) error
	// couldGo refuses what unmount would refuse, or would take out of sight before it
	// waits for its disk. Of one within which others are mounted the kernel says
	// nothing before these are gone. It is nil where unmount is always done at once.
	couldGo func(ctx context.Context, t *Table, m *mounted, nested bool) error
	// there tells whether what mount has made is there, and open to its users.
	there func(*mounted) (bool, error)
}

// did is what a driver's mount has done.
type did struct {
	made  bool // the mount point's directory
	found bool // nothing: the very mount was there
}

// drivers are all that there are, one a file, by the names that Kata has for
// them.
var drivers = []*driver{blk, scsi, ephemeral, local, virtioFS}

// Drivers returns the values of Storage.driver that this agent knows.
func Drivers() []string { return namesOf(func(*driver) bool { return true }) }

// DeviceDrivers returns those of Drivers that mount a block device.
func DeviceDrivers() []string { return namesOf(func(d *driver) bool { return d.device }) }

func namesOf(matches func(*driver) bool) (names []string) {
	for _, d := range drivers {
		if matches(d) {
			names = append(names, d.name)
		}
	}
	return names
}

// driverOf returns the driver of a name, or nil.
func driverOf(name string) *driver {
	for _, d := range drivers {
		if d.name == name {
			return d
		}
	}
	return nil
}

// origin is what is mounted. One without a block device has a zero one, and is known
// by its name.
type origin struct {
	path   string // the device's node, or the name that mountinfo has
	device mount.Device
}

// same tells whether two origins are one.
func (o origin) same(p origin) bool { return o.path == p.path && o.device.Same(p.device) }

// deviceOrigin is a block device as an origin.
func deviceOrigin(d blockdev.Device, err error) (origin, error) {
	return origin{d.Path, mount.Device{Number: d.Number, Seq: d.Seq}}, err
}

// named is find for what has no block device.
func named(_ context.Context, r request) (origin, error) { return origin{path: r.source}, nil }
