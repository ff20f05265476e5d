package storage

import (
	"context"
	"slices"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
)

// blk is a disk, named by its PCI path or its node below /dev.
var blk = &driver{
	name: "blk", device: true, volume: true,
	check: func(r request) error {
		if r.source == "" {
			return errkind.New(errkind.InvalidArgument, "source %q is not a device: give a PCI path such as 02/01 or a path below /dev", r.source)
		}
		return checkDiskFilesystem(r)
	},
	find: func(ctx context.Context, r request) (origin, error) {
		return deviceOrigin(blockdev.Find(ctx, r.source, r.serial))
	},
	mount: mountOrigin, unmount: unmount, there: (*mounted).isMounted, couldGo: couldUnmount,
}

// checkDiskFilesystem refuses a filesystem that does not live on a disk.
func checkDiskFilesystem(r request) error {
	if !slices.Contains(filesystem.Names(), r.fstype) {
		return errkind.New(errkind.InvalidArgument, "unknown fstype %.40q, this agent has %v", r.fstype, filesystem.Names())
	}
	if r.options.Has("errors=panic") {
		return errkind.New(errkind.InvalidArgument, "option errors=panic: a volume must not panic its VM: use errors=remount-ro")
	}
	return nil
}
