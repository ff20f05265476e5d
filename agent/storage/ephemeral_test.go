package storage

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
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

// Somebody unmounts a storage that has been updated. A call mounts it again with the options of the
// last update, also when the agent was restarted since then.
func TestStorageIsMountedAgainAsItWasUpdated(t *testing.T) {
	for name, next := range map[string]func(*testing.T, *Table) *Table{
		"the same agent": func(_ *testing.T, table *Table) *Table { return table },
		"the next agent": restarted,
	} {
		t.Run(name, func(t *testing.T) {
			dir := ownDir(t)
			table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
			storage := agentpb.Storage{Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", MountPoint: filepath.Join(dir, "memory"), Options: []string{"size=1m,mode=700,nosuid,ro"}}
			if err := hold(t, table, &storage); err != nil {
				t.Fatal(err)
			}
			for _, options := range []string{"size=2m,rw", "nr_inodes=100,noexec", "size=4m,mode=755,uid=5", "size=3m,suid"} {
				update := storage
				update.Options = []string{remountOption, options}
				if err := table.Update(t.Context(), []*agentpb.Storage{&update}); err != nil {
					t.Fatalf("%s: %v", options, err)
				}
			}
			before, err := mount.Topmost(storage.MountPoint)
			if err != nil {
				t.Fatal(err)
			}
			table = next(t, table)
			mounttest.Unmount(t, storage.MountPoint)
			if err := hold(t, table, &storage); err != nil {
				t.Fatal(err)
			}
			after, err := mount.Topmost(storage.MountPoint)
			if err != nil {
				t.Fatal(err)
			}
			if after.Options != before.Options || after.VFSOptions != before.VFSOptions {
				t.Errorf("mounted again\nwant %s %s\ngot  %s %s", before.Options, before.VFSOptions, after.Options, after.VFSOptions)
			}
			if err := table.ReleaseAll(t.Context(), always); err != nil {
				t.Error(err)
			}
		})
	}
}

// Somebody unmounts a storage and mounts the same there with other options. A call does not take
// that for the storage, however often the agent is restarted meanwhile.
func TestStorageThatSomebodyHasMountedOtherwiseIsRefused(t *testing.T) {
	for restarts := range 3 {
		table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
		storage := inMemory(filepath.Join(ownDir(t), "memory"))
		if err := hold(t, table, storage); err != nil {
			t.Fatal(err)
		}
		mountedBySomebody := func(flags uintptr) {
			mounttest.Unmount(t, storage.MountPoint)
			mounttest.Mount(t, "shm", storage.MountPoint, "tmpfs", flags, "")
			for range restarts {
				table = restarted(t, table)
			}
		}
		mountedBySomebody(unix.MS_RDONLY)
		if err := hold(t, table, storage); errkind.Of(err) != errkind.AlreadyExists {
			t.Errorf("read-only, %d restarts\nwant it refused\ngot  %v", restarts, err)
		}
		mountedBySomebody(0)
		if err := hold(t, table, storage); err != nil {
			t.Errorf("as it was, %d restarts: %v", restarts, err)
		}
	}
}

// A destroy that fails mounts a storage again, which is the storage's own mount from then on. It is
// not compared with the options of the request, which the kernel may show in another form. The next
// agent knows it, too.
func TestStorageThatADestroyHasPutBackIsItsOwn(t *testing.T) {
	table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
	storage := inMemory(filepath.Join(ownDir(t), "memory"))
	storage.Options = []string{"nr_blocks=100"}
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	if err := table.ReleaseAll(t.Context(), func() bool { return false }); errkind.Of(err) != errkind.DeadlineExceeded {
		t.Fatalf("not agreed\nwant it refused for that\ngot  %v", err)
	}
	for range 2 {
		if err := hold(t, table, storage); err != nil {
			t.Errorf("asked for again: %v", err)
		}
		table = restarted(t, table)
	}
}

// The agent is killed after it has mounted a storage again, and before it has noted that mount. The
// next agent takes the mount for the storage's own.
func TestStorageMountedAgainByAnAgentThatWasKilledIsItsOwn(t *testing.T) {
	table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
	storage := inMemory(filepath.Join(ownDir(t), "memory"))
	storage.Options = []string{"nr_blocks=100"}
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	mounttest.Unmount(t, storage.MountPoint)
	table.disclaim(table.at(storage.MountPoint))
	mounttest.Mount(t, "shm", storage.MountPoint, "tmpfs", 0, "nr_blocks=100")
	if err := hold(t, restarted(t, table), storage); err != nil {
		t.Error(err)
	}
}

// Somebody mounts a tmpfs with other options in a storage's place. An update does not make these
// the storage's options: neither the update nor a call takes that mount for the storage.
func TestUpdateOfAMountThatSomebodyHasMadeOtherwiseIsRefused(t *testing.T) {
	table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
	storage := inMemory(filepath.Join(ownDir(t), "memory"))
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	update := inMemory(storage.MountPoint)
	update.Options = []string{remountOption, "nr_blocks=100"} // shown as size=400k
	for _, flags := range []uintptr{unix.MS_RDONLY, 0} {
		mounttest.Unmount(t, storage.MountPoint)
		mounttest.Mount(t, "shm", storage.MountPoint, "tmpfs", flags, "")
		refused := flags != 0
		if err := table.Update(t.Context(), []*agentpb.Storage{update}); (errkind.Of(err) == errkind.AlreadyExists) != refused || !refused && err != nil {
			t.Errorf("update, flags %x\nwant refused %v\ngot  %v", flags, refused, err)
		}
		if err := hold(t, table, storage); (errkind.Of(err) == errkind.AlreadyExists) != refused || !refused && err != nil {
			t.Errorf("call, flags %x\nwant refused %v\ngot  %v", flags, refused, err)
		}
	}
}

// Another mount covers a storage: an update would change what nobody finds. It is refused with the
// way out, whether the cover could be taken for the storage or not.
func TestUpdateOfACoveredStorageIsRefused(t *testing.T) {
	table := newTable()
	storage := inMemory(filepath.Join(ownDir(t), "a", "memory"))
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	update := inMemory(storage.MountPoint)
	update.Options = []string{remountOption, "nr_blocks=100"}
	for name, cover := range map[string][2]string{
		"the same kind":    {"shm", storage.MountPoint},
		"another kind":     {"other", storage.MountPoint},
		"the folder above": {"other", filepath.Dir(storage.MountPoint)},
	} {
		mounttest.Mount(t, cover[0], cover[1], "tmpfs", 0, "")
		if err := table.Update(t.Context(), []*agentpb.Storage{update}); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "unmount that first") {
			t.Errorf("%s\nwant it refused with the way out\ngot  %v", name, err)
		}
		mounttest.Unmount(t, cover[1])
	}
	if err := table.Update(t.Context(), []*agentpb.Storage{update}); err != nil {
		t.Errorf("in sight again: %v", err)
	}
}

// The agent cannot mount a storage again, somebody mounts it with other options, and the agent is
// restarted. The next agent does not take that mount for the storage's own.
func TestStorageThatCouldNotBeMountedAgainKeepsItsIdentity(t *testing.T) {
	table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
	storage := inMemory(filepath.Join(ownDir(t), "memory"))
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	mounttest.Unmount(t, storage.MountPoint)
	if err := errors.Join(os.RemoveAll(storage.MountPoint), os.WriteFile(storage.MountPoint, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := hold(t, table, storage); err == nil {
		t.Fatal("it was mounted on a file")
	}
	if err := errors.Join(os.Remove(storage.MountPoint), os.Mkdir(storage.MountPoint, 0o700)); err != nil {
		t.Fatal(err)
	}
	mounttest.Mount(t, "shm", storage.MountPoint, "tmpfs", unix.MS_RDONLY, "")
	if err := hold(t, restarted(t, table), storage); errkind.Of(err) != errkind.AlreadyExists {
		t.Errorf("want it refused\ngot  %v", err)
	}
}

// A storage is mounted again and is gone at once, or cannot be put back after a destroy that has
// failed. Somebody then mounts it with other options. Neither this agent nor the next one takes
// that mount for the storage's own.
func TestStorageThatIsNotMountedAgainKeepsItsIdentity(t *testing.T) {
	for name, again := range map[string]func(*testing.T, *Table, *mounted) error{
		"gone at once": func(t *testing.T, table *Table, m *mounted) error {
			mounttest.Unmount(t, m.mountPoint)
			brief := *ephemeral
			brief.mount = func(ctx context.Context, d *devices, r request, from origin) (did, error) {
				did, err := mountOrigin(ctx, d, r, from)
				return did, errors.Join(err, unix.Unmount(r.mountPoint, 0))
			}
			m.driver = &brief
			defer func() { m.driver = ephemeral }()
			return table.mountAgain(t.Context(), m)
		},
		"not put back": func(t *testing.T, table *Table, m *mounted) error {
			kept, err := keepMount(m)
			if err != nil {
				t.Fatal(err)
			}
			defer kept.Close()
			mounttest.Unmount(t, m.mountPoint)
			if err := errors.Join(os.Remove(m.mountPoint), os.WriteFile(m.mountPoint, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = errors.Join(os.Remove(m.mountPoint), os.Mkdir(m.mountPoint, 0o700)) }()
			return table.putBack(m, layer{kept: kept})
		},
	} {
		t.Run(name, func(t *testing.T) {
			table := stateful(t, filepath.Join(t.TempDir(), "state.json"))
			storage := inMemory(filepath.Join(ownDir(t), "memory"))
			if err := hold(t, table, storage); err != nil {
				t.Fatal(err)
			}
			if err := again(t, table, table.at(storage.MountPoint)); err == nil {
				t.Fatal("it was mounted")
			}
			mounttest.Mount(t, "shm", storage.MountPoint, "tmpfs", unix.MS_RDONLY, "")
			for _, agent := range []string{"this agent", "the next one"} {
				if err := hold(t, table, storage); errkind.Of(err) != errkind.AlreadyExists {
					t.Errorf("%s\nwant it refused\ngot  %v", agent, err)
				}
				table = restarted(t, table)
			}
		})
	}
}
