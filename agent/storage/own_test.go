package storage

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/agent/volume"
)

// Somebody unmounts the volume and mounts it again, and the host repeats its call: the storage is
// held, and is probed like any other.
func TestStorageThatWasMountedAgainIsOwned(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := newTable()
	for _, when := range []string{"mounted", "mounted again by somebody else"} {
		if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
			t.Fatal(err)
		}
		v, err := table.volumes.(*volume.Table).Lookup(place)
		if err != nil {
			t.Fatal(err)
		}
		if !v.Owned() {
			t.Errorf("%s: nobody probes it by writing", when)
		}
		if err := table.volumes.Quiet(t.Context(), place, func() (bool, error) { return false, unix.Unmount(place, 0) }); err != nil {
			t.Fatal(err)
		}
		mounttest.Mount(t, disk, place, "xfs", 0, "")
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}
