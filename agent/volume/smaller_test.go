package volume

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// Data beyond the end of a disk that has become smaller cannot be read and may be lost: the volume
// is not grown, and CheckResize promises no growth.
func TestDiskSmallerThanItsFilesystemIsNotGrown(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			const whole = 320 << 20
			image := mounttest.Image(t, fstype)
			dir, disk := mounttest.Dir(t), mounttest.Attach(t, image)
			mounttest.Mount(t, disk, dir, fstype, 0, "")
			table := newTable()
			v, err := table.Lookup(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer table.Forget(dir)
			for _, size := range []int64{whole, whole + 512} { // the original size, and one that is larger by less than a block
				mounttest.SetSize(t, disk, image, size)
				if err := v.CheckResize(t.Context(), 0); err != nil {
					t.Errorf("on a disk of %d bytes\nwant it can grow\ngot  %v", size, err)
				}
			}
			for _, size := range []int64{whole / 2, whole - 512} {
				mounttest.SetSize(t, disk, image, size)
				for call, err := range map[string]error{
					"CheckResize(0)":     v.CheckResize(t.Context(), 0),
					"CheckResize(twice)": v.CheckResize(t.Context(), 2*whole),
					"Resize(0)":          v.Resize(t.Context(), 0, 0),
					"Resize(its own)":    v.Resize(t.Context(), whole, 0),
				} {
					if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), fmt.Sprint(size)) || !strings.Contains(err.Error(), fmt.Sprint(whole)) {
						t.Errorf("%s on a disk of %d bytes\nwant a FailedPrecondition that names both sizes\ngot  %v", call, size, err)
					}
				}
			}
		})
	}
}

// The disk has its size again, but its contents may have changed.
func TestDiskThatWasSmallerIsNotGrown(t *testing.T) {
	dir := mounttest.Dir(t)
	mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "xfs")), dir, "xfs", 0, "")
	top, err := mount.Topmost(dir)
	if err != nil {
		t.Fatal(err)
	}
	table := newTable()
	if err := table.Own(dir, mount.Identify(top), health.Past{Smaller: time.Now()}); err != nil {
		t.Fatal(err)
	}
	defer table.Forget(dir)
	if _, err := table.Stats(t.Context(), dir); err != nil { // waits for the first look
		t.Fatal(err)
	}
	if err := table.Resize(t.Context(), dir, 0, 0); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "may be lost") {
		t.Errorf("want a FailedPrecondition that says why\ngot  %v", err)
	}
}
