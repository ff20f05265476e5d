package vm

import (
	"context"

	"github.com/directvol/directvol/host/fsck"
)

// Fsck is one run of a filesystem check on a detached disk.
type Fsck = fsck.Run

// Check runs the check of a filesystem on an image; see fsck.Check.
func Check(ctx context.Context, fstype, image string) (Fsck, error) {
	return fsck.Check(ctx, fstype, image)
}

// Repair makes e2fsck repair an ext4 image; see fsck.Repair.
func Repair(ctx context.Context, image string) (Fsck, error) {
	return fsck.Repair(ctx, image)
}
