package volumes

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// DestroySandbox fails while a volume is in use, and changes nothing: the mounts keep their ids.
func TestDestroyThatFailsChangesNothing(t *testing.T) {
	g := guest(t)
	idle, busy := mounted(t, g, "xfs"), mounted(t, g, "ext4")
	writer, err := busy.StartWriter(within(t, jobLimit), 0)
	must(t, err)
	must(t, writer.Await(within(t, jobLimit), miB))
	before := vmtest.Mounts(t, g)
	for range 2 {
		refused(t, g.Agent().DestroySandbox(limited(t)), codes.FailedPrecondition, busy.GuestPath, "in use")
		if got := vmtest.Mounts(t, g); got != before {
			t.Fatalf("mounts\nwant %s\ngot  %s", before, got)
		}
	}
	_, other := attached(t, g, "ext4")
	must(t, container(t, g, "afterwards", other))
	remove(t, g, "afterwards")
	must(t, writer.Stop(limited(t)))
	isHealthy(t, idle)
	freshlyVerified(t, busy, writer.Ledger().Bytes())
}

// A DestroySandbox that fails late, after it has unmounted some storages, mounts them again with
// their files.
func TestDestroyThatFailsLateGivesAllBack(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "xfs")
	failOneWrite(t, g, v)
	memory := &agentpb.Storage{Driver: "ephemeral", Source: "tmpfs", Fstype: "tmpfs", MountPoint: "/run/test/memory", Options: []string{"size=1m"}}
	must(t, container(t, g, "memory", memory))
	for _, path := range []string{memory.MountPoint, v.GuestPath} {
		must(t, g.Remote.WriteFile(limited(t), path+"/file", []byte(path)))
	}
	end := keepMounts(t, g)
	refused(t, g.Agent().DestroySandbox(limited(t)), codes.FailedPrecondition, v.GuestPath, "still in use in the guest")
	for _, path := range []string{memory.MountPoint, v.GuestPath} {
		if got, err := g.Remote.ReadFile(limited(t), path+"/file"); err != nil || string(got) != path {
			t.Errorf("%s/file\nwant it there\ngot  %q, error %v", path, got, err)
		}
	}
	if total := statFS(t, g, memory.MountPoint); total.Blocks*uint64(total.BlockSize) != miB {
		t.Errorf("the tmpfs\nwant its size, %d\ngot  %d", miB, total.Blocks*uint64(total.BlockSize))
	}
	end()
	remove(t, g, "memory")
	becomes(t, v, failedOnce) // no unmount has cleared the memory of the failure
	until(t, func() bool { return v.Unmount(limited(t)) == nil })
	must(t, v.Mount(limited(t)))
	isHealthy(t, v)
}

// A volume in another mount namespace is not released, so the host must not detach its disk. The
// error names the processes that have the volume, and the same call succeeds when they have ended.
func TestVolumeThatAnotherNamespaceHasIsNotReleased(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		_, storage := attached(t, g, fstype)
		must(t, container(t, g, "released", storage))
		end := keepMounts(t, g)
		for range 2 {
			refused(t, g.Agent().RemoveContainer(limited(t), "released"), codes.FailedPrecondition, storage.MountPoint, "still in use in the guest", "test-guest")
		}
		// The container still holds the volume, and may ask for it again.
		must(t, container(t, g, "released", storage))
		if !vmtest.IsMounted(t, g, storage.MountPoint) {
			t.Error("it is not mounted though its container was made again")
		}
		end()
		until(t, func() bool { return g.Agent().RemoveContainer(limited(t), "released") == nil }) // the namespace's end continues after the end of its last process
	})
}

// keepMounts makes a process keep all mounts in another namespace, until end is called.
func keepMounts(t *testing.T, g *vm.Guest) (end func()) {
	t.Helper()
	end, err := g.KeepMounts(within(t, jobLimit))
	must(t, err)
	return end
}

// until waits until is returns true. It is for changes that no event announces.
func until(t *testing.T, is func() bool) {
	t.Helper()
	ctx := limited(t)
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for !is() {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatal("it does not come to be so")
		}
	}
}

// A container whose second storage does not appear must not unmount its first storage if another
// container shares it meanwhile.
func TestContainerThatFailsTakesNothingFromAnother(t *testing.T) {
	g := guest(t)
	_, shared := attached(t, g, "xfs")
	shared.Shared = true
	missing := &agentpb.Storage{Driver: "blk", Source: "02/1f", Fstype: "ext4", MountPoint: "/run/test/missing"}
	fails := make(chan error, 1)
	go func() { fails <- container(t, g, "fails", shared, missing) }()
	until(t, func() bool { return vmtest.IsMounted(t, g, shared.MountPoint) })
	must(t, container(t, g, "stays", shared))
	refused(t, <-fails, codes.DeadlineExceeded, missing.MountPoint)
	if !vmtest.IsMounted(t, g, shared.MountPoint) {
		t.Error("it was unmounted although its container's create had succeeded")
	}
	// A shared storage belongs to the sandbox from the first OK on; here it ends with the disk.
	remove(t, g, "stays")
	must(t, g.Remote.Unmount(limited(t), shared.MountPoint, 0))
}

// A container that is removed while the agent waits for its disk ends at once.
func TestRemoveEndsACreateThatAwaitsItsDisk(t *testing.T) {
	g := guest(t)
	_, first := attached(t, g, "ext4")
	missing := &agentpb.Storage{Driver: "blk", Source: "02/1f", Fstype: "ext4", MountPoint: "/run/test/missing"}
	created := make(chan error, 1)
	go func() { created <- container(t, g, "ended", first, missing) }()
	until(t, func() bool { return vmtest.IsMounted(t, g, first.MountPoint) })
	must(t, g.Agent().RemoveContainer(limited(t), "ended"))
	if vmtest.IsMounted(t, g, first.MountPoint) {
		t.Error("it is still mounted though its container was removed")
	}
	refused(t, <-created, codes.FailedPrecondition, "it was removed while")
}
