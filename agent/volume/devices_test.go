package volume

import (
	"strings"
	"testing"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// A request does not say which device of a btrfs grows, so none does. All else goes on.
func TestBtrfsOfTwoDevicesIsMeasuredAndNotGrown(t *testing.T) {
	dir := mounttest.Dir(t)
	images := []string{mounttest.Image(t, "ext4"), mounttest.Image(t, "ext4")}
	mounttest.Run(t, "mkfs.btrfs", "-q", "-f", images[0], images[1])
	disks := []string{mounttest.Attach(t, images[0]), mounttest.Attach(t, images[1])}
	mounttest.Mount(t, disks[0], dir, "btrfs", 0, "device="+disks[1])
	for i, image := range images {
		mounttest.SetSize(t, disks[i], image, 640<<20)
	}
	table := newTable()
	defer table.Forget(dir)
	before, err := table.Stats(t.Context(), dir)
	if err != nil || before.Bytes.Total != 640<<20 || before.Inodes.Total != 0 {
		t.Errorf("\nwant 640 MiB and no inodes\ngot  %+v, error %v", before, err)
	}
	for call, err := range map[string]error{
		"Resize":      table.Resize(t.Context(), dir, 0, 0),
		"CheckResize": table.CheckResize(t.Context(), dir, 0),
	} {
		if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), disks[0]) || !strings.Contains(err.Error(), disks[1]) {
			t.Errorf("%s\nwant a FailedPrecondition that names both devices\ngot  %v", call, err)
		}
	}
	if after, err := table.Stats(t.Context(), dir); err != nil || after.Bytes.Total != before.Bytes.Total {
		t.Errorf("it changed from %+v to %+v, error %v", before, after, err)
	}
}
