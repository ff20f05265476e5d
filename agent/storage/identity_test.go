package storage

import (
	"encoding/json"
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

// onDisk returns a Storage for a disk at a mount point.
func onDisk(disk, fstype, mountPoint string, options ...string) *agentpb.Storage {
	return &agentpb.Storage{Driver: "blk", Source: disk, Fstype: fstype, MountPoint: mountPoint, Options: options}
}

// hold makes a container hold a storage until the test ends.
func hold(t *testing.T, table *Table, s *agentpb.Storage) error {
	t.Helper()
	err := table.Hold(t.Context(), "c1", []*agentpb.Storage{s}, always)
	if err == nil {
		t.Cleanup(func() { _ = unix.Unmount(s.MountPoint, unix.MNT_DETACH) })
	}
	return err
}

// Somebody has bind-mounted only a folder of the volume at the mount point.
func TestFolderOfTheVolumeIsNotTheVolume(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		dir := mounttest.Dir(t)
		disk := mounttest.Attach(t, mounttest.Image(t, fstype))
		elsewhere, place := filepath.Join(dir, "elsewhere"), filepath.Join(dir, "place")
		mounttest.Mount(t, disk, elsewhere, fstype, 0, "")
		if err := os.Mkdir(filepath.Join(elsewhere, "folder"), 0o755); err != nil {
			t.Fatal(err)
		}
		mounttest.Mount(t, filepath.Join(elsewhere, "folder"), place, "", unix.MS_BIND, "")
		err := hold(t, newTable(), onDisk(disk, fstype, place))
		if errkind.Of(err) != errkind.AlreadyExists || !strings.Contains(err.Error(), "/folder") {
			t.Errorf("%s\nwant it refused, and the folder named\ngot  %v", fstype, err)
		}
	}
}

// A volume counts as unmounted if somebody has replaced its mount by a bind mount of one of its
// folders.
func TestMountOfAVolumesFolderIsNotTheVolume(t *testing.T) {
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	elsewhere, place := filepath.Join(dir, "elsewhere"), filepath.Join(dir, "place")
	table, storage := newTable(), onDisk(disk, "xfs", place)
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	mounttest.Mount(t, disk, elsewhere, "xfs", 0, "")
	if err := os.Mkdir(filepath.Join(elsewhere, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := table.volumes.Quiet(t.Context(), place, func() (bool, error) { return false, unix.Unmount(place, 0) }); err != nil {
		t.Fatal(err)
	}
	mounttest.Mount(t, filepath.Join(elsewhere, "folder"), place, "", unix.MS_BIND, "")
	if err := hold(t, table, storage); errkind.Of(err) != errkind.AlreadyExists {
		t.Errorf("asked for again\nwant it refused\ngot  %v", err)
	}
	if there, err := table.at(place).isMounted(); there || err != nil {
		t.Errorf("want it not there\ngot  %v, error %v", there, err)
	}
	table.volumes.Forget(place)
}

// An existing mount is taken over only if it is what the request would have made.
func TestMountIsTakenOverWhereItsOptionsAgree(t *testing.T) {
	for name, c := range map[string]struct {
		fstype string
		flags  uintptr
		data   string
		asks   []string
		differ string // the option that the error names; "" if the options agree
	}{
		"plain ext4":              {fstype: "ext4"},
		"plain ext3":              {fstype: "ext3"},
		"ext3's defaults":         {fstype: "ext3", asks: []string{"data=ordered", "barrier", "errors=continue"}},
		"ext3, nobarrier unasked": {fstype: "ext3", data: "nobarrier", differ: "nobarrier"},
		"plain btrfs":             {fstype: "btrfs"},
		"btrfs options":           {fstype: "btrfs", data: "compress=zstd,commit=60", asks: []string{"compress=zstd", "commit=60"}},
		"compress unasked":        {fstype: "btrfs", data: "compress=zstd", differ: "compress=zstd:3"},
		"plain xfs":               {fstype: "xfs"},
		"read-only both":          {fstype: "ext4", flags: unix.MS_RDONLY, asks: []string{"ro"}},
		"read-only, asked rw":     {fstype: "ext4", flags: unix.MS_RDONLY, differ: "ro"},
		"read-only xfs, asked rw": {fstype: "xfs", flags: unix.MS_RDONLY, asks: []string{"rw"}, differ: "ro"},
		"writable, asked ro":      {fstype: "xfs", asks: []string{"ro"}, differ: "ro"},
		"flags":                   {fstype: "ext4", flags: unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOATIME, asks: []string{"nodev,nosuid", "noatime"}},
		"strictatime":             {fstype: "xfs", flags: unix.MS_STRICTATIME, asks: []string{"strictatime"}},
		"relatime said":           {fstype: "xfs", asks: []string{"relatime", "_netdev"}},
		"no noexec":               {fstype: "ext4", asks: []string{"noexec"}, differ: "noexec"},
		"noexec unasked":          {fstype: "ext4", flags: unix.MS_NOEXEC, differ: "noexec"},
		"noatime unasked":         {fstype: "xfs", flags: unix.MS_NOATIME, differ: "noatime"},
		"sync":                    {fstype: "ext4", flags: unix.MS_SYNCHRONOUS, asks: []string{"sync"}},
		"sync unasked":            {fstype: "ext4", flags: unix.MS_SYNCHRONOUS, differ: "sync"},
		"ext4 options":            {fstype: "ext4", data: "data=journal,nobarrier,commit=30", asks: []string{"data=journal", "nobarrier", "commit=30"}},
		"ext4's defaults":         {fstype: "ext4", asks: []string{"data=ordered", "barrier", "errors=continue"}},
		"nobarrier unasked":       {fstype: "ext4", data: "nobarrier", differ: "nobarrier"},
		"another commit":          {fstype: "ext4", data: "commit=30", asks: []string{"commit=60"}, differ: "commit=60"},
		"no discard":              {fstype: "xfs", asks: []string{"discard"}, differ: "discard"},
		"discard":                 {fstype: "xfs", data: "discard", asks: []string{"discard"}},
		"discard unasked":         {fstype: "xfs", data: "discard", differ: "discard"},
		"xfs options":             {fstype: "xfs", data: "nouuid,logbsize=64k", asks: []string{"nouuid", "logbsize=65536"}},
		"tmpfs":                   {fstype: "tmpfs", data: "size=4m,mode=0700", asks: []string{"size=4096k", "mode=700"}},
		"tmpfs, its defaults":     {fstype: "tmpfs", asks: []string{"mode=1777", "size=50%"}},
		"a larger tmpfs":          {fstype: "tmpfs", data: "size=4m", asks: []string{"size=8m"}, differ: "size=8"},
		"tmpfs without its size":  {fstype: "tmpfs", asks: []string{"size=8m"}, differ: "size=8"},
		"tmpfs, size unasked":     {fstype: "tmpfs", data: "size=8m", differ: "size=8"},
	} {
		t.Run(name, func(t *testing.T) {
			place := filepath.Join(mounttest.Dir(t), "place")
			storage := &agentpb.Storage{Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: place, Options: c.asks}
			if c.fstype != "tmpfs" {
				storage = onDisk(mounttest.Attach(t, mounttest.Image(t, c.fstype)), c.fstype, place, c.asks...)
			}
			mounttest.Mount(t, storage.Source, place, c.fstype, c.flags, c.data)
			table := newTable()
			err := hold(t, table, storage)
			if c.differ == "" && err != nil || c.differ != "" && (errkind.Of(err) != errkind.AlreadyExists || !strings.Contains(err.Error(), c.differ)) {
				t.Errorf("mounted with %#x, %q, asked for with %q\nwant %q named, or OK\ngot  %v", c.flags, c.data, c.asks, c.differ, err)
			}
			if err != nil {
				return
			}
			if err := table.Release(t.Context(), "c1"); err != nil || len(table.Mounted()) != 0 {
				t.Errorf("released: %v, left %v", err, table.Mounted())
			}
		})
	}
}

// volumeWithState mounts a volume for a container, and ends the agent.
func volumeWithState(t *testing.T, disk, fstype string) (state, place string) {
	t.Helper()
	dir := mounttest.Dir(t)
	state, place = filepath.Join(dir, "state.json"), filepath.Join(dir, "place")
	table := stateful(t, state)
	if err := hold(t, table, onDisk(disk, fstype, place)); err != nil {
		t.Fatal(err)
	}
	ended(t, table, place)
	return state, place
}

// ended ends an agent: its watch looks no more.
func ended(t *testing.T, table *Table, place string) {
	t.Helper()
	if err := table.volumes.Quiet(t.Context(), place, func() (bool, error) { return true, nil }); err != nil {
		t.Fatal(err)
	}
	if err := table.state.Close(); err != nil {
		t.Fatal(err)
	}
}

// next starts the next agent and returns its table and storages.
func next(t *testing.T, state string) (*Table, []Mount) {
	t.Helper()
	table := stateful(t, state)
	if err := table.Recover(); err != nil {
		t.Fatal(err)
	}
	return table, table.Mounted()
}

// An ext4 that has grown to 16 groups shows an option that it had before as the default for fewer
// groups (_ext4_show_options in Linux 6.1's fs/ext4/super.c).
func TestGrowthDoesNotChangeTheComparedOptions(t *testing.T) {
	r, err := parse(onDisk("/dev/vda", "ext4", "/run/grown"))
	if err != nil {
		t.Fatal(err)
	}
	grown := &mount.Info{FSType: "ext4", Options: "rw,relatime", VFSOptions: "rw,mb_optimize_scan=0"}
	if missing, extra := r.options.Differences(grown); len(missing) != 0 || len(extra) != 0 {
		t.Errorf("want no difference\ngot  %q requested but missing, %q present but not requested", missing, extra)
	}
}

// While no agent runs, a disk is removed, and another disk gets its place, its name and its number,
// and is mounted at the same mount point, perhaps with the same mount number.
func TestAnotherDiskInTheSamePlaceIsNotTheVolume(t *testing.T) {
	image := mounttest.Image(t, "xfs")
	clone := filepath.Join(t.TempDir(), "clone.img")
	mounttest.Run(t, "cp", "--sparse=always", image, clone)
	disk := mounttest.Attach(t, image)
	state, place := volumeWithState(t, disk, "xfs")
	mounttest.Unmount(t, place)
	mounttest.Reattach(t, disk, clone)
	mounttest.Mount(t, disk, place, "xfs", 0, "")
	table, left := next(t, state)
	if len(left) != 0 {
		t.Errorf("want the other disk left alone\ngot  %v", left)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
	if top, err := mount.Topmost(place); err != nil || top == nil {
		t.Errorf("somebody's mount of another disk was unmounted: %v, error %v", top, err)
	}
}

// A volume that somebody has unmounted and mounted again is the same volume. A volume that was
// formatted in between is not.
func TestVolumeMountedAgainIsTheVolumeAndFormattedAnewIsNot(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		for _, formatted := range []bool{false, true} {
			image := mounttest.Image(t, fstype)
			disk := mounttest.Attach(t, image)
			state, place := volumeWithState(t, disk, fstype)
			mounttest.Unmount(t, place)
			if formatted {
				mounttest.Format(t, fstype, disk)
			}
			mounttest.Mount(t, disk, place, fstype, 0, "")
			table, left := next(t, state)
			if len(left) != 1 { // even if its disk is in use otherwise
				t.Fatalf("%s, formatted anew: %v\nwant it held\ngot  %v", fstype, formatted, left)
			}
			if there, err := table.at(place).isMounted(); there == formatted || err != nil {
				t.Errorf("%s, formatted anew: %v\nwant the volume there: %v\ngot  %v, error %v", fstype, formatted, !formatted, there, err)
			}
			if err := table.Release(t.Context(), "c1"); (err != nil) != formatted || err != nil && errkind.Of(err) != errkind.FailedPrecondition {
				t.Errorf("%s, formatted anew: %v\nwant the other mount left, and an error that its disk is in use\ngot  %v", fstype, formatted, err)
			}
			if top, err := mount.Topmost(place); err != nil || (top != nil) != formatted {
				t.Errorf("%s, formatted anew: %v\ngot %v, error %v", fstype, formatted, top, err)
			}
			ended(t, table, place)
		}
	}
}

// An agent of version 1 recorded only the numbers of the device and of the mount.
func TestVolumeOfAnOlderAgentIsFoundByItsState(t *testing.T) {
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4"))
	state, place := volumeWithState(t, disk, "ext4")
	text, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]any
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	all["version"] = 1
	for _, one := range all["storages"].([]any) {
		record := one.(map[string]any)
		if record["mount_id"] == nil || record["number"] == nil || record["mount"] == nil || record["diskseq"] == nil {
			t.Errorf("want what each version reads\ngot  %v", record)
		}
		delete(record, "mount")
		delete(record, "diskseq")
	}
	if text, err = json.Marshal(all); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(state, text, 0o600); err != nil {
		t.Fatal(err)
	}
	table, left := next(t, state)
	if len(left) != 1 {
		t.Fatalf("want the volume\ngot  %v", left)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
	ended(t, table, place)
}

// A disk has left, and another disk has its place: a repeated request mounts that disk, because the
// earlier mount is gone with the earlier disk.
func TestStorageIsMountedFromTheDiskThatReplacedItsOwn(t *testing.T) {
	first, second := mounttest.Image(t, "xfs"), mounttest.Image(t, "xfs")
	disk := mounttest.Attach(t, first)
	place := filepath.Join(mounttest.Dir(t), "place")
	table, storage := newTable(), onDisk(disk, "xfs", place)
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	was := table.at(place).identity
	if err := table.volumes.Quiet(t.Context(), place, func() (bool, error) { return false, unix.Unmount(place, 0) }); err != nil {
		t.Fatal(err)
	}
	mounttest.Reattach(t, disk, second)
	if err := hold(t, table, storage); err != nil {
		t.Fatal(err)
	}
	if now := table.at(place).identity; now.Same(was) || now.UUID == was.UUID || now.UUID == "" {
		t.Errorf("want another volume\nwas %+v\nis  %+v", was, now)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
}
