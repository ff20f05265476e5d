package storage

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/agentpb"
)

func newTable() *Table {
	log := logrus.New()
	log.SetOutput(io.Discard)
	entry := logrus.NewEntry(log)
	return NewTable(entry, volume.NewTable(health.NewMonitor(entry)), time.Millisecond, nil)
}

// always is an agreed function for a caller that is still waiting.
func always() bool { return true }

// ownDir returns a temporary directory by its path in mountinfo.
func ownDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestEveryDriverHasAllItsFunctions(t *testing.T) {
	for _, d := range drivers {
		if d.check == nil || d.find == nil || d.mount == nil || d.unmount == nil || d.there == nil || driverOf(d.name) != d {
			t.Errorf("driver %q lacks something, or has another's name", d.name)
		}
		if d.device && !slices.Contains(DeviceDrivers(), d.name) || !slices.Contains(Drivers(), d.name) {
			t.Errorf("driver %s is not listed", d.name)
		}
	}
}

func TestStorageThatItsDriverCannotMakeIsRefused(t *testing.T) {
	for name, test := range map[string]struct {
		storage agentpb.Storage
		kind    errkind.Kind
		says    string
	}{
		"ephemeral on a disk":     {agentpb.Storage{Driver: "ephemeral", Source: "tmpfs", Fstype: "ext4"}, errkind.InvalidArgument, "ext4"},
		"ephemeral in huge pages": {agentpb.Storage{Driver: "ephemeral", Source: "nodev", Fstype: "hugetlbfs"}, errkind.InvalidArgument, "hugetlbfs"},
		"ephemeral of no name":    {agentpb.Storage{Driver: "ephemeral", Fstype: "tmpfs"}, errkind.InvalidArgument, "source"},
		"ephemeral for a group":   {agentpb.Storage{Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", Options: []string{"size=1m", "fsgid=5"}}, errkind.Unimplemented, "fsgid"},
		"local for a group":       {agentpb.Storage{Driver: "local", Options: []string{"mode=0777", "fsgid=5"}}, errkind.Unimplemented, "fsgid"},
		"local, read-only":        {agentpb.Storage{Driver: "local", Options: []string{"ro", "mode=0777"}}, errkind.InvalidArgument, "mode="},
		"local of a size":         {agentpb.Storage{Driver: "local", Options: []string{"size=1m"}}, errkind.InvalidArgument, "size=1m"},
		"local, mode not octal":   {agentpb.Storage{Driver: "local", Options: []string{"mode=0888"}}, errkind.InvalidArgument, "0888"},
		"local, mode too long":    {agentpb.Storage{Driver: "local", Options: []string{"mode=10000"}}, errkind.InvalidArgument, "10000"},
		"local, two modes":        {agentpb.Storage{Driver: "local", Options: []string{"mode=700", "mode=777"}}, errkind.InvalidArgument, "mode=700,mode=777"},
		"scsi in memory":          {agentpb.Storage{Driver: "scsi", Source: "0:1", Fstype: "tmpfs"}, errkind.InvalidArgument, "tmpfs"},
		"virtio-fs on a disk":     {agentpb.Storage{Driver: "virtio-fs", Source: "kataShared", Fstype: "ext4"}, errkind.InvalidArgument, "ext4"},
		"virtio-fs of no tag":     {agentpb.Storage{Driver: "virtio-fs", Fstype: "virtiofs"}, errkind.InvalidArgument, "tag"},
		"virtio-fs, tag too long": {agentpb.Storage{Driver: "virtio-fs", Source: strings.Repeat("x", tagBytes+1), Fstype: "virtiofs"}, errkind.InvalidArgument, "tag"},
	} {
		test.storage.MountPoint = "/run/test/refused"
		_, err := parse(&test.storage)
		if errkind.Of(err) != test.kind || err == nil || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), test.storage.MountPoint) {
			t.Errorf("%s\nwant kind %v, %q and the mount point\ngot  %v", name, test.kind, test.says, err)
		}
	}
}

func TestLocalDirectoryHasItsModeAndKeepsItsFiles(t *testing.T) {
	table, dir := newTable(), filepath.Join(ownDir(t), "a", "local")
	storage := &agentpb.Storage{Driver: "local", Source: "local", Fstype: "local", Options: []string{"mode=1777"}, MountPoint: dir}
	for _, holder := range []string{"first", "second", "second"} {
		if err := table.Hold(t.Context(), holder, []*agentpb.Storage{storage}, always); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode() != fs.ModeDir|fs.ModeSticky|0o777 {
		t.Fatalf("want a directory of mode 1777\ngot  %v, error %v", info.Mode(), err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, holder := range []string{"first", "second"} {
		if err := table.Release(t.Context(), holder); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(file); err != nil || len(table.Mounted()) != 0 {
		t.Errorf("want the file kept and nothing held\ngot  error %v, %v", err, table.Mounted())
	}
}

// A destroy that fails mounts nested storages again after those that contain them, with their
// files.
func TestAbandonedDestroyRestoresNestedStorages(t *testing.T) {
	for range 30 {
		dir := ownDir(t)
		var storages []*agentpb.Storage
		for path := dir + "/a"; len(storages) < 4; path += "/a" {
			storages = append(storages, &agentpb.Storage{Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", MountPoint: path})
		}
		table := newTable()
		if err := table.Hold(t.Context(), "c1", storages, always); errors.Is(err, unix.EPERM) {
			t.Skipf("it mounts: %v: run it as root, with sudo go test -run '^%s$'", err, t.Name())
		} else if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir+"/a", unix.MNT_DETACH) }) // if the test has failed
		for _, s := range storages {
			if err := os.WriteFile(s.MountPoint+"/file", []byte(s.MountPoint), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := table.ReleaseAll(t.Context(), func() bool { return false }); errkind.Of(err) != errkind.DeadlineExceeded {
			t.Fatal(err)
		}
		for _, s := range storages {
			if got, err := os.ReadFile(s.MountPoint + "/file"); err != nil || string(got) != s.MountPoint {
				t.Fatalf("%s/file\nwant it there\ngot  %q, error %v", s.MountPoint, got, err)
			}
		}
		if err := table.ReleaseAll(t.Context(), always); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLocalDirectoryThatStayedEmptyGoes(t *testing.T) {
	table, dir := newTable(), filepath.Join(ownDir(t), "local")
	good := &agentpb.Storage{Driver: "local", MountPoint: dir}
	bad := &agentpb.Storage{Driver: "local", MountPoint: "/proc/nothing/local"}
	if err := table.Hold(t.Context(), "c1", []*agentpb.Storage{good, bad}, always); errkind.Of(err) != errkind.InvalidArgument {
		t.Fatalf("want the second one refused\ngot  %v", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("want the first one unwound\ngot  %v", err)
	}
}

func TestOnlyEphemeralStoragesThatAreMountedAreUpdated(t *testing.T) {
	table, dir := newTable(), filepath.Join(ownDir(t), "local")
	held := &agentpb.Storage{Driver: "local", MountPoint: dir}
	if err := table.Hold(t.Context(), "c1", []*agentpb.Storage{held}, always); err != nil {
		t.Fatal(err)
	}
	for want, storage := range map[errkind.Kind]*agentpb.Storage{
		errkind.InvalidArgument: held,
		errkind.NotFound:        {Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", MountPoint: dir, Options: []string{"remount", "size=1m"}},
	} {
		if err := table.Update(t.Context(), []*agentpb.Storage{storage}); errkind.Of(err) != want {
			t.Errorf("driver %s\nwant kind %v\ngot  %v", storage.Driver, want, err)
		}
	}
}

func TestErrorHasTheRealWaitForAMissingDevice(t *testing.T) {
	table := newTable()
	table.hotplug = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := table.find(ctx, "device", request{driver: blk, source: "/dev/none"})
	if errkind.Of(err) != errkind.DeadlineExceeded || strings.Contains(err.Error(), "1h") {
		t.Errorf("want a DeadlineExceeded that does not speak of an hour\ngot  %v", err)
	}
}

func TestOriginOfADeviceIsItsNumberAndOfOthersTheName(t *testing.T) {
	disk, shm := origin{"/dev/vda", mount.Device{Number: unix.Mkdev(254, 0)}}, origin{path: "shm"}
	ext4, tmpfs := request{fstype: "ext4"}, request{fstype: "tmpfs"}
	onDisk := &mount.Info{Source: "/dev/root", Major: 254, Minor: 0, FSType: "ext4", Root: "/"}
	folder := &mount.Info{Source: "/dev/root", Major: 254, Minor: 0, FSType: "ext4", Root: "/folder"}
	inMemory := &mount.Info{Source: "shm", Major: 0, Minor: 31, FSType: "tmpfs", Root: "/"}
	named := &mount.Info{Source: "shm", Major: 254, Minor: 16, FSType: "ext4", Root: "/"}
	for _, test := range []struct {
		request
		of   origin
		info *mount.Info
		want bool
	}{
		{ext4, disk, onDisk, true}, {ext4, disk, folder, false}, {ext4, disk, inMemory, false}, {ext4, disk, named, false}, {tmpfs, disk, onDisk, false},
		{tmpfs, shm, inMemory, true}, {tmpfs, shm, onDisk, false}, {tmpfs, shm, named, false}, {ext4, shm, inMemory, false},
	} {
		if got := test.isOf(test.of, test.info); got != test.want {
			t.Errorf("%v of %v\nwant %v\ngot  %v", test.info, test.of, test.want, got)
		}
	}
}

// A Storage comes from the host, and its mount point and options are passed to mount(2).
func FuzzStorage(f *testing.F) {
	for _, s := range []*agentpb.Storage{
		{Driver: "blk", Source: "02/01", Fstype: "ext4", MountPoint: "/run/v", Options: []string{"ro", "discard"}},
		{Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: "/run/shm", Options: []string{"size=1m,mode=1777"}},
		{Driver: "local", MountPoint: "/run/../l", Options: []string{"mode=0777"}, Shared: true},
	} {
		b, err := s.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s agentpb.Storage
		if s.Unmarshal(b) != nil {
			return
		}
		r, err := parse(&s)
		if err != nil {
			return
		}
		if r.driver == nil || !filepath.IsAbs(r.mountPoint) || r.mountPoint != filepath.Clean(r.mountPoint) || r.mountPoint == "/" ||
			strings.ContainsRune(r.options.Data+r.mountPoint+r.source, 0) {
			t.Errorf("%v was taken as %+v", s, r)
		}
	})
}
