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

// Somebody mounts something over a storage between its mount and its watch. The cover is nobody's,
// and is not probed by writing.
func TestCoverOfAStorageIsNotOwnedInItsPlace(t *testing.T) {
	for _, fstype := range []string{"xfs", "tmpfs"} {
		t.Run(fstype, func(t *testing.T) {
			place := filepath.Join(mounttest.Dir(t), "place")
			s := inMemory(place)
			if fstype == "xfs" {
				s = onDisk(mounttest.Attach(t, mounttest.Image(t, "xfs")), "xfs", place)
			}
			table := newTable()
			if err := hold(t, table, s); err != nil {
				t.Fatal(err)
			}
			volumes, m := table.volumes.(*volume.Table), table.at(place)
			volumes.Forget(place) // as right after the mount
			mounttest.Mount(t, mounttest.Attach(t, mounttest.Image(t, "ext4")), place, "ext4", 0, "")
			if err := table.own(m); err != nil {
				t.Error(err)
			}
			if over, err := volumes.Lookup(place); err != nil || over.FSType != "ext4" || over.Owned() {
				t.Errorf("the cover\nwant an ext4 that is not owned\ngot  %+v, error %v", over, err)
			}
			mounttest.Unmount(t, place)
			if v, err := volumes.Lookup(place); err != nil || v.FSType != fstype || v.Owned() != (fstype == "xfs") {
				t.Errorf("in sight again\nwant it back, and a disk's owned\ngot  %+v, error %v", v, err)
			}
			if err := table.Release(t.Context(), "c1"); err != nil {
				t.Error(err)
			}
		})
	}
}

// Somebody mounts a storage's disk there with other options, and the agent is restarted. That mount
// is refused by calls, so the agent does not own it.
func TestDiskThatSomebodyHasMountedOtherwiseIsNotOwnedByTheNextAgent(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4"))
	s := onDisk(disk, "ext4", place)
	table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
	if err := hold(t, table, s); err != nil {
		t.Fatal(err)
	}
	for _, flags := range []uintptr{unix.MS_NOEXEC, 0} {
		if err := table.volumes.Quiet(t.Context(), place, func() (bool, error) { return true, unix.Unmount(place, 0) }); err != nil {
			t.Fatal(err)
		}
		mounttest.Mount(t, disk, place, "ext4", flags, "")
		table = restarted(t, table)
		v, err := table.volumes.(*volume.Table).Lookup(place)
		if want := flags == 0; err != nil || v.Owned() != want {
			t.Errorf("flags %x\nwant owned %v\ngot  %+v, error %v", flags, want, v, err)
		}
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}
