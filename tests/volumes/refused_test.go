package volumes

import (
	"context"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/vm"
)

// nowhere is the slot behind the last bridge that no disk gets: disks get 01 to 1e in turn.
const nowhere = "03/1f"

func TestImpossibleStorageIsRefused(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	_, ext4 := attached(t, g, "ext4")
	_, xfs := attached(t, g, "xfs")
	unformatted := blank(t, g)
	for name, c := range map[string]struct {
		of     *agentpb.Storage
		change func(*agentpb.Storage)
		code   codes.Code
		says   string
	}{
		"no driver":                  {ext4, func(s *agentpb.Storage) { s.Driver = "" }, codes.InvalidArgument, "driver"},
		"unknown driver":             {ext4, func(s *agentpb.Storage) { s.Driver = "floppy" }, codes.InvalidArgument, "floppy"},
		"no fstype":                  {ext4, func(s *agentpb.Storage) { s.Fstype = "" }, codes.InvalidArgument, "fstype"},
		"unknown fstype":             {ext4, func(s *agentpb.Storage) { s.Fstype = "ext5" }, codes.InvalidArgument, "ext5"},
		"another fstype, ext4":       {xfs, func(s *agentpb.Storage) { s.Fstype = "ext4" }, codes.InvalidArgument, "the disk holds xfs"},
		"another fstype, xfs":        {ext4, func(s *agentpb.Storage) { s.Fstype = "xfs" }, codes.InvalidArgument, "the disk holds ext4"},
		"an unformatted disk":        {unformatted, func(s *agentpb.Storage) {}, codes.InvalidArgument, "check that it is formatted"},
		"and the kernel's words":     {unformatted, func(s *agentpb.Storage) {}, codes.InvalidArgument, "kernel says: EXT4-fs ("},
		"unknown option":             {ext4, func(s *agentpb.Storage) { s.Options = []string{"speed=high"} }, codes.InvalidArgument, "speed=high"},
		"no source":                  {ext4, func(s *agentpb.Storage) { s.Source = "" }, codes.InvalidArgument, "source"},
		"PCI path with a bad digit":  {ext4, func(s *agentpb.Storage) { s.Source = "02/zz" }, codes.InvalidArgument, "02/zz"},
		"PCI path with a gap":        {ext4, func(s *agentpb.Storage) { s.Source = "02//01" }, codes.InvalidArgument, "02//01"},
		"PCI path off the bus":       {ext4, func(s *agentpb.Storage) { s.Source = "02/20" }, codes.InvalidArgument, "02/20"},
		"PCI path of a bridge":       {ext4, func(s *agentpb.Storage) { s.Source = "02" }, codes.DeadlineExceeded, `"02"`},
		"PCI path to nothing":        {ext4, func(s *agentpb.Storage) { s.Source = nowhere }, codes.DeadlineExceeded, nowhere},
		"device that is not there":   {ext4, func(s *agentpb.Storage) { s.Source = "/dev/vdzz" }, codes.DeadlineExceeded, "/dev/vdzz"},
		"file that is no device":     {ext4, func(s *agentpb.Storage) { s.Source = "/init" }, codes.InvalidArgument, "/init"},
		"device by a detour":         {ext4, func(s *agentpb.Storage) { s.Source = "/dev/../init" }, codes.InvalidArgument, "/dev"},
		"character device":           {ext4, func(s *agentpb.Storage) { s.Source = "/dev/null" }, codes.InvalidArgument, "not a block device"},
		"no mount point":             {ext4, func(s *agentpb.Storage) { s.MountPoint = "" }, codes.InvalidArgument, "mount point"},
		"relative mount point":       {ext4, func(s *agentpb.Storage) { s.MountPoint = "run/test" }, codes.InvalidArgument, "mount point"},
		"the root":                   {ext4, func(s *agentpb.Storage) { s.MountPoint = "/run/.." }, codes.InvalidArgument, "mount point"},
		"mount point with a zero":    {ext4, func(s *agentpb.Storage) { s.MountPoint = "/run/a\x00b" }, codes.InvalidArgument, "mount point"},
		"mount point, too long":      {ext4, func(s *agentpb.Storage) { s.MountPoint = "/run/" + strings.Repeat("x", 256) }, codes.InvalidArgument, "mount point"},
		"mount point, far too long":  {ext4, func(s *agentpb.Storage) { s.MountPoint = strings.Repeat("/x", 4096) }, codes.InvalidArgument, "mount point"},
		"mount point that is a file": {ext4, func(s *agentpb.Storage) { s.MountPoint = "/init" }, codes.InvalidArgument, "/init"},
		"mount point by a link":      {ext4, func(s *agentpb.Storage) { s.MountPoint = "/proc/self/cwd/run/linked" }, codes.InvalidArgument, "link"},
		"driver options":             {ext4, func(s *agentpb.Storage) { s.DriverOptions = []string{"x"} }, codes.Unimplemented, "driver_options"},
		"fs_group":                   {ext4, func(s *agentpb.Storage) { s.FsGroup = &agentpb.FSGroup{GroupId: 1} }, codes.Unimplemented, "fs_group"},
	} {
		t.Run(name, func(t *testing.T) {
			storage := *c.of
			c.change(&storage)
			refused(t, container(t, g, "refused", &storage), c.code, c.says)
			if c.code == codes.InvalidArgument { // always refused, also by CreateSandbox
				err := g.Agent().CreateSandbox(limited(t), &agentpb.CreateSandboxRequest{SandboxId: "test", Storages: []*agentpb.Storage{&storage}})
				refused(t, err, c.code, c.says)
			}
		})
	}
}

// blank attaches an unformatted disk, and returns a Storage that says ext4.
func blank(t *testing.T, g *vm.Guest) *agentpb.Storage {
	t.Helper()
	v, err := g.Volume(limited(t), "unformatted", "ext4", int64(disks["ext4"]))
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := v.Detach(ctx); err != nil {
			t.Error(err)
		}
	})
	must(t, os.Truncate(v.Path, 0))
	must(t, os.Truncate(v.Path, int64(disks["ext4"])))
	must(t, g.Attach(limited(t), v.Volume))
	disk, _ := g.VM().Disk(v.DiskID())
	return &agentpb.Storage{Driver: "blk", Source: disk.PCIPath, Fstype: "ext4", MountPoint: "/run/test/" + v.ID}
}

func TestContainerIDsAreNames(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	_, storage := attached(t, g, "ext4")
	for _, id := range []string{"", "x", "..", "../up", "a/b", "-dash", "white space", "new\nline", "zero\x00", "\xff", strings.Repeat("x", 256)} {
		refused(t, container(t, g, id, storage), codes.InvalidArgument, "container id")
		refused(t, g.Agent().RemoveContainer(limited(t), id), codes.InvalidArgument, "container id")
	}
}

func TestStatsOfAPathThatIsNotAVolume(t *testing.T) {
	g := guest(t)
	for path, code := range map[string]codes.Code{
		"": codes.InvalidArgument, "run": codes.InvalidArgument, "/etc": codes.InvalidArgument, "/init": codes.InvalidArgument,
		"/run/test/nothing": codes.NotFound, "/init/below": codes.NotFound, "/run/zero\x00": codes.InvalidArgument, "/" + strings.Repeat("x", 5000): codes.NotFound,
	} {
		says := path
		if len(says) > 100 || strings.ContainsRune(says, 0) {
			says = path[:5]
		}
		_, err := g.Agent().GetVolumeStats(limited(t), path)
		refused(t, err, code, says)
	}
}
