package storage

import (
	"context"

	"github.com/directvol/directvol/agent/blockdev"
)

// scsi is a disk behind the guest's SCSI controller, named by its ID and LUN.
var scsi = &driver{
	name: "scsi", device: true, volume: true,
	check: checkDiskFilesystem,
	find: func(ctx context.Context, r request) (origin, error) {
		return deviceOrigin(blockdev.FindSCSI(ctx, r.source, r.serial))
	},
	mount: mountOrigin, unmount: unmount, there: (*mounted).isMounted, couldGo: couldUnmount,
}
