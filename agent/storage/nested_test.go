package storage

import (
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

func inMemory(mountPoint string) *agentpb.Storage {
	return &agentpb.Storage{Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: mountPoint}
}

// A storage mounted over a parent folder of another one would hide it: the users of the hidden
// storage would write elsewhere.
func TestStorageThatWouldHideAnotherIsRefused(t *testing.T) {
	dir := mounttest.Dir(t)
	table := newTable()
	inner, outer := inMemory(filepath.Join(dir, "a", "b")), inMemory(filepath.Join(dir, "a"))
	err := table.Hold(t.Context(), "c1", []*agentpb.Storage{inner, outer}, always)
	if errors.Is(err, unix.EPERM) {
		t.Skipf("it mounts: %v: run it as root, with sudo go test -run '^%s$'", err, t.Name())
	}
	t.Cleanup(func() {
		for _, s := range []*agentpb.Storage{outer, inner, outer} {
			_ = unix.Unmount(s.MountPoint, unix.MNT_DETACH)
		}
	})
	if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), inner.MountPoint) {
		t.Errorf("in one call\nwant it refused, and the hidden one named\ngot  %v", err)
	}
	if len(table.Mounted()) > 0 {
		t.Errorf("want nothing held\ngot  %v", table.Mounted())
	}
	if err := table.Hold(t.Context(), "c1", []*agentpb.Storage{inner}, always); err != nil {
		t.Fatal(err)
	}
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{outer}, always); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("by another container\nwant it refused\ngot  %v", err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{outer, inner}, always); err != nil {
		t.Errorf("in the other order: %v", err)
	}
	if err := table.Release(t.Context(), "c2"); err != nil {
		t.Error(err)
	}
}

// Somebody else has mounted something over a folder above a storage. OK would mean that the storage
// is at its path.
func TestHiddenStorageIsNotReportedAsMounted(t *testing.T) {
	dir := mounttest.Dir(t)
	table, above := newTable(), filepath.Join(dir, "a")
	s := inMemory(filepath.Join(above, "b"))
	if err := hold(t, table, s); err != nil {
		t.Skipf("it mounts: %v: run it as root", err)
	}
	mounttest.Mount(t, "cover", above, "tmpfs", 0, "")
	for what, do := range map[string]func() error{
		"held again": func() error { return hold(t, table, s) },
		"let go":     func() error { return table.Release(t.Context(), "c1") },
	} {
		if err := do(); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), above+" ") {
			t.Errorf("%s\nwant it refused, and named what hides it\ngot  %v", what, err)
		}
	}
	if err := os.Mkdir(s.MountPoint, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := hold(t, table, s); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("with another folder in its place\nwant it refused\ngot  %v", err)
	}
	mounttest.Unmount(t, above)
	if err := hold(t, table, s); err != nil {
		t.Errorf("in sight again: %v", err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}

// Taking over an existing mount that contains a storage hides nothing. If it were refused, the
// mount's container could not be removed.
func TestMountWithAStorageInItIsTakenOver(t *testing.T) {
	for name, table := range map[string]func(place string) *Table{
		"somebody's":   func(string) *Table { return newTable() },
		"a stranger's": func(place string) *Table { return besideStranger(t, place) },
	} {
		outer := inMemory(filepath.Join(mounttest.Dir(t), "a"))
		inner := inMemory(filepath.Join(outer.MountPoint, "b"))
		mounttest.Mount(t, outer.Source, outer.MountPoint, "tmpfs", 0, "")
		table := table(outer.MountPoint)
		if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{inner}, always); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := hold(t, table, outer); err != nil {
				t.Errorf("%s\nwant it taken over\ngot  %v", name, err)
			}
		}
		if mounts, err := mount.At(outer.MountPoint); err != nil || len(mounts) != 1 {
			t.Errorf("%s\nwant one mount\ngot  %d, error %v", name, len(mounts), err)
		}
		for _, holder := range []string{"c2", "c1"} {
			if err := table.Release(t.Context(), holder); err != nil {
				t.Errorf("%s: %s: %v", name, holder, err)
			}
		}
		if top, err := mount.Topmost(outer.MountPoint); top != nil || err != nil {
			t.Errorf("%s, in the end\nwant it gone\ngot  %v, error %v", name, top, err)
		}
	}
}

// An existing mount that really hides a storage is not taken over.
func TestMountThatHidesAStorageIsNotTakenOver(t *testing.T) {
	outer := inMemory(filepath.Join(mounttest.Dir(t), "a"))
	inner := inMemory(filepath.Join(outer.MountPoint, "b"))
	table := newTable()
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{inner}, always); err != nil {
		t.Skipf("it mounts: %v: run it as root", err)
	}
	mounttest.Mount(t, outer.Source, outer.MountPoint, "tmpfs", 0, "")
	if err := hold(t, table, outer); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), inner.MountPoint) {
		t.Errorf("want it refused, and the hidden one named\ngot  %v", err)
	}
	mounttest.Unmount(t, outer.MountPoint)
	if err := table.Release(t.Context(), "c2"); err != nil {
		t.Error(err)
	}
}

// unmountedByOthers returns a table whose container c1 holds a storage that somebody has unmounted,
// and a storage nested in it that no call has asked for yet.
func unmountedByOthers(t *testing.T) (table *Table, outer, inner *agentpb.Storage) {
	t.Helper()
	outer = inMemory(filepath.Join(mounttest.Dir(t), "a"))
	inner = inMemory(filepath.Join(outer.MountPoint, "b"))
	table = newTable()
	if err := hold(t, table, outer); err != nil {
		t.Skipf("it mounts: %v: run it as root", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(outer.MountPoint, unix.MNT_DETACH) })
	mounttest.Unmount(t, outer.MountPoint)
	return table, outer, inner
}

// Somebody has unmounted a storage, and another storage was mounted in its folder since: mounting
// the first one again would hide the second.
func TestStorageThatWouldHideAnotherIsNotMountedAgain(t *testing.T) {
	table, outer, inner := unmountedByOthers(t)
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{inner}, always); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(inner.MountPoint, unix.MNT_DETACH) })
	for range 2 {
		if err := hold(t, table, outer); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), inner.MountPoint) {
			t.Errorf("want it refused, and the other one named\ngot  %v", err)
		}
		if top, err := mount.Topmost(outer.MountPoint); top != nil || err != nil {
			t.Errorf("want nothing mounted over the other one\ngot  %v, error %v", top, err)
		}
	}
	if err := table.Release(t.Context(), "c2"); err != nil {
		t.Error(err)
	}
	if err := hold(t, table, outer); err != nil {
		t.Errorf("without the other one: %v", err)
	}
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{inner}, always); err != nil {
		t.Errorf("the other one, after it: %v", err)
	}
	for _, holder := range []string{"c2", "c1"} {
		if err := table.Release(t.Context(), holder); err != nil {
			t.Errorf("%s: %v", holder, err)
		}
	}
}

// While a storage is being mounted again, no storage is mounted in its folder: one of the two calls
// sees the other's.
func TestStorageWaitsForTheOneThatIsMountedAgainAboveIt(t *testing.T) {
	table, outer, inner := unmountedByOthers(t)
	done := table.beginAgain(table.at(outer.MountPoint))
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{inner}, always); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "call again") {
		t.Errorf("before it is there\nwant it refused\ngot  %v", err)
	}
	mounttest.Mount(t, outer.Source, outer.MountPoint, "tmpfs", 0, "")
	if err := table.Hold(t.Context(), "c2", []*agentpb.Storage{inner}, always); err != nil {
		t.Errorf("when it is there: %v", err)
	}
	done()
	for _, holder := range []string{"c2", "c1"} {
		if err := table.Release(t.Context(), holder); err != nil {
			t.Errorf("%s: %v", holder, err)
		}
	}
}
