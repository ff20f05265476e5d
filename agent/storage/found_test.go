package storage

import (
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
)

// A call that fails undoes what it has done. It does not unmount a mount that existed before,
// because somebody else may use it.
func TestFailedCallKeepsEarlierMounts(t *testing.T) {
	bad := &agentpb.Storage{Driver: "local", MountPoint: "/proc/nothing/local"}
	for name, table := range map[string]func(place string) *Table{
		"somebody's": func(string) *Table { return newTable() },
		"a stranger's, whose holders are not known": func(place string) *Table {
			table, _ := recovered(t, filepath.Join(t.TempDir(), "state.json"), `{"version":3,"boot_id":"BOOT","storages":[{"driver":"later","mount_point":"`+place+`","holders":[]}]}`)
			return table
		},
	} {
		place := filepath.Join(mounttest.Dir(t), "place")
		disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
		mounttest.Mount(t, disk, place, "xfs", 0, "")
		table := table(place)
		strangers, _ := remaining(t, table)
		for range 2 {
			if err := table.Hold(t.Context(), "c1", []*agentpb.Storage{onDisk(disk, "xfs", place), bad}, always); err == nil {
				t.Fatal("the bad storage was mounted")
			}
			if top, err := mount.Topmost(place); top == nil || err != nil {
				t.Errorf("%s\nwant it mounted, as it was\ngot  %v, error %v", name, top, err)
			}
			if v, err := table.volumes.(*volume.Table).Lookup(place); err != nil || v.Owned() {
				t.Errorf("%s\nwant it to be probed by no writing, as before\ngot  error %v", name, err)
			}
			if left, err := remaining(t, table); err != nil || len(left) != len(strangers) {
				t.Errorf("%s: strangers\nwant %d\ngot  %d, error %v", name, len(strangers), len(left), err)
			}
		}
		// A call that succeeds takes the mount over, and it is unmounted with its last holder.
		if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
			t.Fatal(err)
		}
		if err := table.Release(t.Context(), "c1"); err != nil {
			t.Error(err)
		}
		if top, err := mount.Topmost(place); top != nil || err != nil {
			t.Errorf("%s, after its release\nwant nothing mounted\ngot  %v, error %v", name, top, err)
		}
		if left, err := remaining(t, table); err != nil || len(left) > 0 {
			t.Errorf("%s: strangers, in the end\nwant none\ngot  %d, error %v", name, len(left), err)
		}
	}
}
