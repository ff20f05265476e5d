package storage

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/protocols/agentpb"
)

func TestOptionsOfTheHostDoNotReachTheKernel(t *testing.T) {
	for _, c := range []struct {
		options []string
		want    mount.Options
	}{
		{[]string{"bind", "rw", "_netdev", "nofail", "noatime", "ro", "discard", "", "lazytime", "bind,commit=5"}, mount.Options{Flags: unix.MS_NOATIME | unix.MS_RDONLY, Data: "discard,commit=5"}},
		{[]string{"rw", "suid", "dev", "exec", "auto", "nouser", "async"}, mount.Options{}}, // fstab(5)'s defaults, one by one
		{[]string{"silent,loud,nomand,noiversion,nodev,suid"}, mount.Options{Flags: unix.MS_NODEV}},
	} {
		got, err := parse(&agentpb.Storage{Driver: "blk", Source: "02/01", Fstype: "ext4", MountPoint: "/run/v", Options: c.options})
		if err != nil || got.options != c.want {
			t.Errorf("%v\nwant %+v\ngot  %+v, error %v", c.options, c.want, got.options, err)
		}
	}
}

func TestStorageThatMakesNoSenseIsRefusedByName(t *testing.T) {
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
		kind   refusal.Kind
		says   string
	}{
		"driver":         {func(s *agentpb.Storage) { s.Driver = "floppy" }, refusal.InvalidArgument, "floppy"},
		"fstype":         {func(s *agentpb.Storage) { s.Fstype = "fat" }, refusal.InvalidArgument, "fat"},
		"source":         {func(s *agentpb.Storage) { s.Source = "" }, refusal.InvalidArgument, "PCI path"},
		"no mount point": {func(s *agentpb.Storage) { s.MountPoint = "" }, refusal.InvalidArgument, "mount point"},
		"relative":       {func(s *agentpb.Storage) { s.MountPoint = "run/v" }, refusal.InvalidArgument, "absolute"},
		"root":           {func(s *agentpb.Storage) { s.MountPoint = "/run/.." }, refusal.InvalidArgument, "below /"},
		"NUL":            {func(s *agentpb.Storage) { s.MountPoint = "/run/\x00" }, refusal.InvalidArgument, "mount point"},
		"endless data":   {func(s *agentpb.Storage) { s.Options = []string{strings.Repeat("x", 5000)} }, refusal.InvalidArgument, "5000"},
		"driver option":  {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial=a", "create_filesystem"} }, refusal.Unimplemented, "driver_options"},
		"no serial":      {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial="} }, refusal.InvalidArgument, "serial"},
		"two serials":    {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial=a", "serial=b"} }, refusal.InvalidArgument, "twice"},
		"endless serial": {func(s *agentpb.Storage) { s.DriverOptions = []string{"serial=" + strings.Repeat("x", 300)} }, refusal.InvalidArgument, "252"},
		"serial, no disk": {func(s *agentpb.Storage) {
			*s = agentpb.Storage{Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: "/run/v", DriverOptions: []string{"serial=a"}}
		}, refusal.Unimplemented, "driver_options"},
		"not built": {func(s *agentpb.Storage) { s.FsGroup = &agentpb.FSGroup{GroupId: 1} }, refusal.Unimplemented, "fs_group"},
	} {
		t.Run(name, func(t *testing.T) {
			bad := good
			test.change(&bad)
			_, err := parse(&bad)
			if refusal.KindOf(err) != test.kind || err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("want kind %v and %q\ngot  %v", test.kind, test.says, err)
			}
		})
	}
}
