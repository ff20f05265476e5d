package storage

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/protocols/agentpb"
)

func TestOptionsOfTheHostDoNotReachTheKernel(t *testing.T) {
	for _, c := range []struct {
		options []string
		want    mount.Options
	}{
		{[]string{"bind", "rw", "_netdev", "nofail", "noatime", "ro", "discard", "", "lazytime", "bind,commit=5"}, mount.Options{Flags: unix.MS_NOATIME | unix.MS_RDONLY, Data: "discard,commit=5"}},
		{[]string{"rw", "suid", "dev", "exec", "auto", "nouser", "async"}, mount.Options{}}, // the defaults of fstab(5), one by one
		{[]string{"silent,loud,nomand,noiversion,nodev,suid"}, mount.Options{Flags: unix.MS_NODEV}},
	} {
		got, err := parse(&agentpb.Storage{Driver: "blk", Source: "02/01", Fstype: "ext4", MountPoint: "/run/v", Options: c.options})
		if err != nil || got.options != c.want {
			t.Errorf("%v\nwant %+v\ngot  %+v, error %v", c.options, c.want, got.options, err)
		}
	}
}

func TestInvalidStorageIsRefusedByName(t *testing.T) {
	good := agentpb.Storage{Driver: "blk", Source: "02/01", Fstype: "ext4", MountPoint: "/run/v"}
	if _, err := parse(&good); err != nil {
		t.Fatal(err)
	}
	promised := good
	promised.DriverOptions = []string{"serial=pvc-1"}
	if r, err := parse(&promised); err != nil || r.serial != "pvc-1" {
		t.Fatalf("with a serial\nwant pvc-1\ngot  %+v, error %v", r, err)
	}
	for name, test := range map[string]struct {
		change func(*agentpb.Storage)
		kind   errkind.Kind
		says   string
	}{
		"driver":         {func(s *agentpb.Storage) { s.Driver = "floppy" }, errkind.InvalidArgument, "floppy"},
		"fstype":         {func(s *agentpb.Storage) { s.Fstype = "fat" }, errkind.InvalidArgument, "fat"},
		"source":         {func(s *agentpb.Storage) { s.Source = "" }, errkind.InvalidArgument, "PCI path"},
		"no mount point": {func(s *agentpb.Storage) { s.MountPoint = "" }, errkind.InvalidArgument, "mount point"},
		"relative":       {func(s *agentpb.Storage) { s.MountPoint = "run/v" }, errkind.InvalidArgument, "absolute"},
		"root":           {func(s *agentpb.Storage) { s.MountPoint = "/run/.." }, errkind.InvalidArgument, "below /"},
		"NUL":            {func(s *agentpb.Storage) { s.MountPoint = "/run/\x00" }, errkind.InvalidArgument, "mount point"},
		"endless data":   {func(s *agentpb.Storage) { s.Options = []string{strings.Repeat("x", 5000)} }, errkind.InvalidArgument, "5000"},
		"driver option":  {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial=a", "create_filesystem"} }, errkind.Unimplemented, "driver_options"},
		"no serial":      {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial="} }, errkind.InvalidArgument, "serial"},
		"two serials":    {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial=a", "serial=b"} }, errkind.InvalidArgument, "twice"},
		"endless serial": {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial=" + strings.Repeat("x", 300)} }, errkind.InvalidArgument, "252"},
		"serial, no disk": {func(s *agentpb.Storage) {
			*s = agentpb.Storage{Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: "/run/v", DriverOptions: []string{"serial=a"}}
		}, errkind.Unimplemented, "driver_options"},
		"not built": {func(s *agentpb.Storage) { s.FsGroup = &agentpb.FSGroup{GroupId: 1} }, errkind.Unimplemented, "fs_group"},
	} {
		t.Run(name, func(t *testing.T) {
			bad := good
			test.change(&bad)
			_, err := parse(&bad)
			if errkind.Of(err) != test.kind || err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("want kind %v and %q\ngot  %v", test.kind, test.says, err)
			}
		})
	}
}
