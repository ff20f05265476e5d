package storage

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/protocols/agentpb"
)

// A stranger that is a second mount of a storage's disk is unmounted by a destroy together with the
// storage: the disk counts as free only after both are gone.
func TestStrangerOnAStoragesDiskIsUnmountedWithIt(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) {
			disk, dir := mounttest.Attach(t, mounttest.Image(t, fstype)), mounttest.Dir(t)
			second, place := filepath.Join(dir, "a-second"), filepath.Join(dir, "place")
			mounttest.Mount(t, disk, second, fstype, 0, "")
			table := besideStranger(t, second)
			if err := hold(t, table, onDisk(disk, fstype, place)); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(place, "file"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := table.ReleaseAll(t.Context(), func() bool { return false }); errkind.Of(err) != errkind.DeadlineExceeded {
				t.Fatalf("not agreed\nwant it refused for that\ngot  %v", err)
			}
			if _, err := os.Stat(filepath.Join(place, "file")); err != nil {
				t.Errorf("put back: %v", err)
			}
			mounttest.Mount(t, disk, second, fstype, 0, "")
			table.strangers = besideStranger(t, second).strangers
			busy, err := os.Open(second)
			if err != nil {
				t.Fatal(err)
			}
			if err := table.ReleaseAll(t.Context(), always); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), second) {
				t.Errorf("while a process uses the stranger\nwant it refused, and %s named\ngot  %v", second, err)
			}
			busy.Close()
			if err := table.ReleaseAll(t.Context(), always); err != nil {
				t.Fatal(err)
			}
			free, err := claim(disk)
			if err != nil {
				t.Fatal(err)
			}
			free.Close()
		})
	}
}

// RemoveContainer does not unmount a mount that is not the container's; its error names the mount.
func TestSecondMountOfAStoragesDiskIsNamed(t *testing.T) {
	disk, dir := mounttest.Attach(t, mounttest.Image(t, "xfs")), mounttest.Dir(t)
	second, place := filepath.Join(dir, "second"), filepath.Join(dir, "place")
	table := newTable()
	if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
		t.Fatal(err)
	}
	mounttest.Mount(t, disk, second, "xfs", 0, "")
	if err := table.Release(t.Context(), "c1"); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), second) {
		t.Errorf("want it refused, and %s named\ngot  %v", second, err)
	}
	if err := unix.Unmount(second, 0); err != nil {
		t.Fatal(err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}

// Only the first few users of a device are named, so that an error fits a line.
func TestUsersOfADeviceAreNamedUpToABound(t *testing.T) {
	disk, dir := mounttest.Attach(t, mounttest.Image(t, "xfs")), mounttest.Dir(t)
	for i := range maxUsers + 2 {
		mounttest.Mount(t, disk, filepath.Join(dir, fmt.Sprint(i)), "xfs", 0, "")
	}
	device, err := blockdev.ByPath(disk)
	if err != nil {
		t.Fatal(err)
	}
	if said := users(device.Number); strings.Count(said, "mounted at ") != maxUsers {
		t.Errorf("want %d named\ngot  %s", maxUsers, said)
	}
}

// If a disk hangs, its UUID cannot be read: the mount is identified by its other properties.
func TestHungDiskIsIdentifiedWithoutItsUUID(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "disk")
	if err := unix.Mkfifo(disk, 0o600); err != nil { // an open waits for a writer
		t.Fatal(err)
	}
	release := sync.OnceFunc(func() {
		if writer, err := os.OpenFile(disk, os.O_RDWR, 0); err == nil {
			writer.Close()
		}
	})
	defer release()
	guard := time.AfterFunc(time.Minute, release)
	m := &mounted{request: request{fstype: "ext4"}, from: origin{path: disk}}
	began := time.Now()
	for range 2 {
		if uuid := m.uuid(); uuid != "" {
			t.Errorf("want none\ngot  %q", uuid)
		}
	}
	if waited := time.Since(began); waited < 2*uuidLimit {
		t.Errorf("waited\nwant %v twice\ngot  %v", uuidLimit, waited)
	}
	if !guard.Stop() {
		t.Error("the mount waited for the disk")
	}
}

// A mount within a storage keeps it from being unmounted, like a process that uses it.
func TestMountWithinAStorageIsNamed(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk, table := mounttest.Attach(t, mounttest.Image(t, "xfs")), newTable()
	if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
		t.Fatal(err)
	}
	within := filepath.Join(place, "within")
	mounttest.Mount(t, "tmpfs", within, "tmpfs", 0, "")
	for name, end := range map[string]func() error{
		"removed":   func() error { return table.Release(t.Context(), "c1") },
		"destroyed": func() error { return table.ReleaseAll(t.Context(), always) },
	} {
		if err := end(); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), within) || strings.Contains(err.Error(), "process") {
			t.Errorf("%s\nwant it refused, and %s named\ngot  %v", name, within, err)
		}
	}
	if err := unix.Unmount(within, 0); err != nil {
		t.Fatal(err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}

// A storage must not hide a stranger, because no destroy could then unmount the stranger.
func TestStorageHidesNoStranger(t *testing.T) {
	dir := mounttest.Dir(t)
	disk, place := mounttest.Attach(t, mounttest.Image(t, "xfs")), filepath.Join(dir, "place")
	stranger := filepath.Join(place, "stranger")
	mounttest.Mount(t, "later", stranger, "tmpfs", 0, "")
	table := besideStranger(t, stranger)
	if err := hold(t, table, onDisk(disk, "xfs", place)); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), stranger) {
		t.Errorf("want it refused, and %s named\ngot  %v", stranger, err)
	}
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Errorf("destroyed: %v", err)
	}
	if top, err := mount.Topmost(stranger); top != nil || err != nil {
		t.Errorf("the stranger\nwant it gone\ngot  %v, error %v", top, err)
	}
}

// strangerWithin returns a table whose container c1 holds an xfs at a place, in which a stranger
// was mounted before.
func strangerWithin(t *testing.T) (table *Table, s *agentpb.Storage, stranger string) {
	t.Helper()
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	stranger = filepath.Join(place, "stranger")
	mounttest.Mount(t, disk, place, "xfs", 0, "")
	mounttest.Mount(t, "later", stranger, "tmpfs", 0, "")
	table, s = besideStranger(t, stranger), onDisk(disk, "xfs", place)
	if err := hold(t, table, s); err != nil {
		t.Fatal(err)
	}
	return table, s, stranger
}

// A stranger was mounted inside a storage before: a destroy unmounts both.
func TestStrangerWithinAStorageIsUnmountedFirst(t *testing.T) {
	table, s, stranger := strangerWithin(t)
	if err := table.Release(t.Context(), "c2"); err != nil {
		t.Errorf("another container's end: %v", err)
	}
	if err := table.Release(t.Context(), "c1"); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), stranger) {
		t.Errorf("its container's end\nwant it refused, and %s named\ngot  %v", stranger, err)
	}
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{stranger, s.MountPoint} {
		if top, err := mount.Topmost(path); top != nil || err != nil {
			t.Errorf("%s\nwant it gone\ngot  %v, error %v", path, top, err)
		}
	}
}

// A destroy that fails after it has unmounted both mounts the storage again first, and the stranger
// in it. Otherwise the stranger would be on the bare folder, and the volume gone from its users.
func TestStrangerWithinAStorageIsRestoredAfterIt(t *testing.T) {
	table, s, stranger := strangerWithin(t)
	files := []string{filepath.Join(s.MountPoint, "file"), filepath.Join(stranger, "file")}
	for _, file := range files {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := table.ReleaseAll(t.Context(), func() bool { return false }); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Fatalf("not agreed\nwant it refused for that\ngot  %v", err)
		}
		for _, file := range files {
			if _, err := os.Stat(file); err != nil {
				t.Errorf("put back: %v", err)
			}
		}
		if err := hold(t, table, s); err != nil {
			t.Errorf("asked for again: %v", err)
		}
	}
	if err := table.ReleaseAll(t.Context(), always); err != nil {
		t.Error(err)
	}
}
