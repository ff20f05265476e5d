package storage

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/protocols/agentpb"
)

// heldTmpfs returns a table with one ephemeral storage, which is held until the test ends.
func heldTmpfs(t *testing.T, options ...string) (table *Table, storage agentpb.Storage) {
	t.Helper()
	table = newTable()
	storage = agentpb.Storage{Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", MountPoint: filepath.Join(ownDir(t), "memory"), Options: options}
	if err := hold(t, table, &storage); err != nil {
		t.Fatal(err)
	}
	return table, storage
}

// A flag that an update has set or cleared stays so after the next update, even if that does not
// name the flag. The kernel clears flags that a remount does not repeat.
func TestUpdateKeepsTheFlagsOfTheUpdateBefore(t *testing.T) {
	table, storage := heldTmpfs(t, "ro", "nosuid", "strictatime")
	for _, step := range []struct {
		options string
		want    string // the mount's flags in mountinfo
	}{
		{"size=2m", "ro,nosuid"},
		{"rw", "rw,nosuid"},
		{"size=4m", "rw,nosuid"},
		{"noexec,noatime", "rw,nosuid,noexec,noatime"},
		{"size=8m", "rw,nosuid,noexec,noatime"},
		{"atime", "rw,nosuid,noexec,relatime"},
		{"noatime,nodiratime", "rw,nosuid,noexec,noatime,nodiratime"},
		{"relatime,exec,diratime", "rw,nosuid,relatime"},
		{"nr_inodes=100", "rw,nosuid,relatime"},
		{"ro,suid", "ro,relatime"},
		{"size=16m", "ro,relatime"},
		{"strictatime", "ro"},
		{"size=1m,rw", "rw"},
	} {
		update := storage
		update.Options = []string{remountOption, step.options}
		if err := table.Update(t.Context(), []*agentpb.Storage{&update}); err != nil {
			t.Fatalf("%s: %v", step.options, err)
		}
		top, err := mount.Topmost(storage.MountPoint)
		if err != nil {
			t.Fatal(err)
		}
		if top.Options != step.want {
			t.Errorf("after an update with %s\nwant %s\ngot  %s", step.options, step.want, top.Options)
		}
	}
	if err := hold(t, table, &storage); err != nil {
		t.Errorf("asked for again, as at first: %v", err)
	}
}

// The error of an update contains the kernel's reason.
func TestUpdateThatTheKernelRefusesSaysWhy(t *testing.T) {
	table, storage := heldTmpfs(t)
	storage.Options = []string{remountOption, "size=lots"}
	err := table.Update(t.Context(), []*agentpb.Storage{&storage})
	if errkind.Of(err) != errkind.InvalidArgument || !strings.Contains(err.Error(), "Bad value for 'size'") {
		t.Errorf("want it refused with the kernel's words\ngot  %v", err)
	}
}
