package volumes

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	kiB = 1 << 10
	miB = 1 << 20
)

// disks are the sizes of the volumes, by filesystem. No btrfs below 256 MiB is resized. mkfs.xfs
// requires 300 MiB or more, and makes four allocation groups of 76 MiB from 304.
var disks = map[string]uint64{"btrfs": 256 * miB, "ext3": 64 * miB, "ext4": 64 * miB, "xfs": 304 * miB}

// eachFilesystem runs a test for ext4 and for xfs.
func eachFilesystem(t *testing.T, test func(t *testing.T, g *vm.Guest, fstype string)) {
	g := guest(t)
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) { test(t, g, fstype) })
	}
}

// everyFilesystem runs a test for each type of filesystem that grows.
func everyFilesystem(t *testing.T, test func(t *testing.T, g *vm.Guest, fstype string)) {
	everyFilesystemIn(t, guest(t), test)
}

// everyFilesystemIn is everyFilesystem in a guest of the test's own.
func everyFilesystemIn(t *testing.T, g *vm.Guest, test func(t *testing.T, g *vm.Guest, fstype string)) {
	for _, fstype := range slices.Sorted(maps.Keys(disks)) {
		t.Run(fstype, func(t *testing.T) { test(t, g, fstype) })
	}
}

var volumes atomic.Int64

// newVolume formats a volume. At the test's end the volume is detached if necessary, and its
// filesystem must be intact.
func newVolume(t *testing.T, g *vm.Guest, fstype string) *vm.Volume {
	t.Helper()
	return volumeIn(t, g, g.Dir, fstype)
}

// volumeIn is newVolume, with the image in a directory of the test's.
func volumeIn(t *testing.T, g *vm.Guest, dir, fstype string) *vm.Volume {
	t.Helper()
	image, err := vm.Scratch(limited(t), dir, fstype, int64(disks[fstype]))
	must(t, err)
	v := g.Take(sandbox.Volume{ID: fmt.Sprintf("%s-%d", fstype, volumes.Add(1)), Path: image, FSType: fstype})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := v.Detach(ctx); err != nil {
			t.Error(err)
			return
		}
		fsck, err := vm.Check(ctx, fstype, v.Path)
		if err == nil {
			err = fsck.Err(fstype)
		}
		if err != nil {
			t.Errorf("after the test: %v", err)
			return // the image stays for inspection
		}
		if err := os.Remove(v.Path); err != nil {
			t.Error(err)
		}
	})
	return v
}

// mounted returns a volume that is attached and mounted.
func mounted(t *testing.T, g *vm.Guest, fstype string, options ...string) *vm.Volume {
	t.Helper()
	v := newVolume(t, g, fstype)
	v.Options = options
	must(t, v.Mount(limited(t)))
	return v
}

// attached returns a volume whose disk the guest has, and a Storage for it. It waits for the disk,
// which a busy guest may see later than an agent waits.
func attached(t *testing.T, g *vm.Guest, fstype string) (*vm.Volume, *agentpb.Storage) {
	t.Helper()
	v := newVolume(t, g, fstype)
	must(t, g.Attach(limited(t), v.Volume))
	_, err := g.DeviceOf(limited(t), v.DiskID())
	must(t, err)
	disk, _ := g.VM().Disk(v.DiskID())
	return v, &agentpb.Storage{Driver: "blk", Source: disk.PCIPath, Fstype: fstype, MountPoint: "/run/test/" + v.ID}
}

// container makes a container with storages.
func container(t *testing.T, g *vm.Guest, id string, storages ...*agentpb.Storage) error {
	t.Helper()
	return g.Agent().CreateContainer(limited(t), &agentpb.CreateContainerRequest{ContainerId: id, Storages: storages})
}

// leavesNoMount fails if the mounts at the end of the test differ from those now.
func leavesNoMount(t *testing.T, g *vm.Guest) {
	t.Helper()
	before := vmtest.Mounts(t, g)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		after, err := g.Remote.ReadFile(ctx, "/proc/self/mountinfo")
		if err != nil || string(after) != before {
			t.Errorf("mounts\nwant %s\ngot  %s (error %v)", before, after, err)
		}
	})
}

// stats returns the statistics of a volume. The call must succeed.
func stats(t *testing.T, v *vm.Volume) *agentpb.VolumeStatsResponse {
	t.Helper()
	s, err := v.LookedStats(limited(t))
	must(t, err)
	return s
}

func statFS(t *testing.T, g *vm.Guest, path string) remote.StatFS {
	t.Helper()
	s, err := g.Remote.StatFS(limited(t), path)
	must(t, err)
	return s
}

func sizes(t *testing.T, v *vm.Volume) vm.Sizes {
	t.Helper()
	s, err := v.Sizes(limited(t))
	must(t, err)
	return s
}

func isHealthy(t *testing.T, v *vm.Volume) {
	t.Helper()
	if c := stats(t, v).VolumeCondition; c.Abnormal || c.Message != "OK" {
		t.Errorf("condition of %s\nwant {false OK}\ngot  %v", v.ID, c)
	}
}

// refused fails unless err comes from the agent, with a code and some words.
func refused(t *testing.T, err error, code codes.Code, says ...string) {
	t.Helper()
	if got := status.Code(err); got != code {
		t.Errorf("\nwant %v\ngot  %v", code, err)
		return
	}
	for _, words := range says {
		if !strings.Contains(err.Error(), words) {
			t.Errorf("\nwant it to say %q\ngot  %v", words, err)
		}
	}
}
