package volumes

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// sharedMemory returns the storage that Kata's runtime makes for a pod's /dev/shm.
func sharedMemory(mountPoint string) *agentpb.Storage {
	return &agentpb.Storage{
		Driver: "ephemeral", Source: "shm", Fstype: "tmpfs", MountPoint: mountPoint,
		Options: []string{"noexec", "nosuid", "nodev", "mode=1777", "size=1048576"},
	}
}

// update remounts ephemeral storages.
func update(t *testing.T, g *vm.Guest, storages ...*agentpb.Storage) error {
	t.Helper()
	_, err := ask[emptypb.Empty](t, g, "UpdateEphemeralMounts", &agentpb.UpdateEphemeralMountsRequest{Storages: storages})
	return err
}

// mountLine returns mountinfo's line for a mount point, or "" if there is none.
func mountLine(t *testing.T, g *vm.Guest, path string) string {
	t.Helper()
	for line := range strings.Lines(vmtest.Mounts(t, g)) {
		if strings.Contains(line, " "+path+" ") {
			return line
		}
	}
	return ""
}

func TestGuestListsItsDrivers(t *testing.T) {
	g := guest(t)
	details, err := g.Agent().GetGuestDetails(limited(t))
	must(t, err)
	for _, driver := range []string{"blk", "scsi", "ephemeral", "local", "virtio-fs"} {
		if !slices.Contains(details.AgentDetails.StorageHandlers, driver) {
			t.Errorf("%s is not among %v", driver, details.AgentDetails.StorageHandlers)
		}
	}
	if devices := details.AgentDetails.DeviceHandlers; !slices.Contains(devices, "blk") || slices.Contains(devices, "local") {
		t.Errorf("device handlers\nwant blk and not local\ngot  %v", devices)
	}
}

func TestEphemeralStorageIsMemoryForItsHolders(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	shm := sharedMemory("/run/test/shm")
	for _, id := range []string{"first", "second", "second"} {
		must(t, container(t, g, id, shm))
	}
	for _, want := range []string{"noexec", "nosuid", "nodev", "- tmpfs shm ", "size=1024k"} {
		if line := mountLine(t, g, shm.MountPoint); !strings.Contains(line, want) {
			t.Errorf("want %s\ngot  %s", want, line)
		}
	}
	answer, err := g.Agent().GetVolumeStats(limited(t), shm.MountPoint)
	must(t, err)
	if total := answer.Usage[0].Total; total != miB || answer.VolumeCondition.Abnormal {
		t.Errorf("\nwant %d bytes, healthy\ngot  %d, %v", miB, total, answer.VolumeCondition)
	}
	other := sharedMemory(shm.MountPoint)
	other.Source = "other"
	refused(t, container(t, g, "third", other), codes.AlreadyExists, shm.MountPoint)
	remove(t, g, "first")
	if !vmtest.IsMounted(t, g, shm.MountPoint) {
		t.Error("it was unmounted from under the second container")
	}
	remove(t, g, "second")
}

func TestEphemeralStorageGetsAnotherSize(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	shm := sharedMemory("/run/test/sized")
	must(t, container(t, g, "sized", shm))
	must(t, g.Remote.WriteFile(limited(t), shm.MountPoint+"/file", make([]byte, 512*kiB)))
	grown := sharedMemory(shm.MountPoint)
	grown.Options = []string{"remount", "size=2097152"} // as Kata's runtime writes it
	for range 2 {
		must(t, update(t, g, grown))
	}
	line := mountLine(t, g, shm.MountPoint)
	if fs := statFS(t, g, shm.MountPoint); fs.Blocks*uint64(fs.BlockSize) != 2*miB || !strings.Contains(line, "nosuid") || !strings.Contains(line, "noexec") {
		t.Errorf("want 2 MiB, and the other options kept\ngot  %s", line)
	}
	tooSmall := sharedMemory(shm.MountPoint)
	tooSmall.Options = []string{"size=4096"}
	refused(t, update(t, g, tooSmall), codes.InvalidArgument, shm.MountPoint, "size=4096")
	if data, err := g.Remote.ReadFile(limited(t), shm.MountPoint+"/file"); err != nil || len(data) != 512*kiB {
		t.Errorf("the file after that: %d bytes, error %v", len(data), err)
	}
	must(t, container(t, g, "sized", shm)) // again, with the first options
	remove(t, g, "sized")
	refused(t, update(t, g, grown), codes.NotFound, shm.MountPoint)
}

func TestOnlyEphemeralStoragesAreUpdated(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4")
	disk, _ := g.VM().Disk(v.DiskID())
	refused(t, update(t, g, &agentpb.Storage{Driver: "blk", Source: disk.PCIPath, Fstype: "ext4", MountPoint: v.GuestPath, Options: []string{"ro"}}), codes.InvalidArgument, "blk")
	disguised := sharedMemory(v.GuestPath)
	refused(t, update(t, g, disguised), codes.NotFound, v.GuestPath)
	foreign := tmpfs(t, g, "/run/test/unknown")
	refused(t, update(t, g, sharedMemory(foreign)), codes.NotFound, foreign)
	must(t, v.Touch(limited(t)))
}

func TestLocalStorageIsADirectory(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	local := &agentpb.Storage{Driver: "local", Source: "local", Fstype: "local", MountPoint: "/run/test/local", Options: []string{"mode=0777"}}
	file := local.MountPoint + "/file"
	must(t, container(t, g, "local", local))
	must(t, g.Remote.WriteFile(limited(t), file, []byte("kept")))
	info, err := g.Remote.Stat(limited(t), local.MountPoint)
	must(t, err)
	if info.Mode&0o777 != 0o777 {
		t.Errorf("mode\nwant 0777\ngot  %#o", info.Mode)
	}
	remove(t, g, "local")
	must(t, container(t, g, "local-again", local))
	if data, err := g.Remote.ReadFile(limited(t), file); err != nil || string(data) != "kept" {
		t.Errorf("what the container before has left\nwant kept\ngot  %q, error %v", data, err)
	}
	remove(t, g, "local-again")
}

// A failed container undoes its storages of every driver in the same way.
func TestFailedContainerLeavesNoStorageOfAnyDriver(t *testing.T) {
	g := guest(t)
	leavesNoMount(t, g)
	_, disk := attached(t, g, "ext4")
	shm := sharedMemory(disk.MountPoint + "/shm")
	local := &agentpb.Storage{Driver: "local", MountPoint: shm.MountPoint + "/local"}
	wrong := sharedMemory("/run/test/wrong")
	wrong.Options = []string{"size=lots"}
	refused(t, container(t, g, "mixed", disk, shm, local, wrong), codes.InvalidArgument, wrong.MountPoint)
	for _, path := range []string{disk.MountPoint, wrong.MountPoint} {
		if _, err := g.Remote.Stat(limited(t), path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	must(t, container(t, g, "mixed", disk, shm, local))
	remove(t, g, "mixed")
}
