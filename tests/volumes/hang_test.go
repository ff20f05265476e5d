package volumes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/host/trial/trialtest"
	"github.com/directvol/directvol/protocols/agentpb"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// hangable returns a mounted volume whose disk can hang at once, and which has room to grow.
func hangable(t *testing.T, g *vm.Guest, fstype string) *vm.Volume {
	t.Helper()
	v := newVolume(t, g, fstype)
	must(t, os.Truncate(v.Path, int64(16*disks[fstype])))
	must(t, v.Mount(limited(t)))
	must(t, v.Serve(limited(t)))
	healsAtEnd(t, v)
	return v
}

func healsAtEnd(t *testing.T, v *vm.Volume) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
		defer cancel()
		if err := v.Heal(ctx); err != nil {
			t.Error(err)
		}
	})
}

// answered makes a call with a deadline, and requires the agent's answer before the deadline. It
// tries a few times, because a busy machine may once be late.
func answered(t *testing.T, call func(context.Context) error) error {
	t.Helper()
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		err := call(ctx)
		late := ctx.Err() != nil
		cancel()
		if !late {
			return err
		}
	}
	t.Error("it is not answered before its deadline")
	return nil
}

func resizing(g *vm.Guest, v *vm.Volume) func(context.Context) error {
	return func(ctx context.Context) error { return g.Agent().ResizeVolume(ctx, v.GuestPath, 0) }
}

func TestDiskThatHangsUnderAWriterIsReportedEarlyAndRecovers(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := hangable(t, g, fstype)
		must(t, g.Agent().ResizeVolume(limited(t), v.GuestPath, 8*disks[fstype])) // room for all data until the disk hangs
		writer := written(t, v, 0)
		isHealthy(t, v)
		must(t, v.Hang(limited(t)))
		becomes(t, v, hung)
		device := sizes(t, v).Device
		refused(t, answered(t, resizing(g, v)), codes.FailedPrecondition, device)
		if stats(t, v).Usage[0].Total == 0 {
			t.Error("a volume that hangs has no statistics")
		}
		must(t, v.Answer())
		becomes(t, v, nothing)
		must(t, writer.Await(within(t, jobLimit), writer.Ledger().Bytes()+4*kiB))
		must(t, writer.Stop(limited(t)))
		must(t, g.Agent().ResizeVolume(limited(t), v.GuestPath, 0))
		freshlyVerified(t, v, writer.Ledger().Bytes())
	})
}

// On an idle volume nothing is in flight until something writes, here a growth.
func TestFirstHungWriteOnAnIdleVolumeIsReportedEarly(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := hangable(t, g, fstype)
		isHealthy(t, v)
		must(t, v.Hang(limited(t)))
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		refused(t, g.Agent().ResizeVolume(short, v.GuestPath, 0), codes.DeadlineExceeded)
		becomes(t, v, hung)
		must(t, v.Answer())
		becomes(t, v, nothing)
		must(t, g.Agent().ResizeVolume(limited(t), v.GuestPath, 0))
	})
}

// A disk that ends a request now and then works: the volume is not inaccessible, and it grows.
func TestSlowDiskIsDegradedAndGrows(t *testing.T) {
	g := guest(t)
	v := newVolume(t, g, "ext4")
	must(t, os.Truncate(v.Path, int64(2*disks["ext4"])))
	must(t, v.Mount(limited(t)))
	must(t, v.Slow(limited(t), 1))
	healsAtEnd(t, v)
	ctx := within(t, jobLimit)
	var writers []*remote.Writer
	for i := range uint64(3) { // writers that keep the disk busy
		writer, err := g.Remote.StartWriter(ctx, remote.WriteBlocks{Path: fmt.Sprintf("%s/written-%d", v.GuestPath, i), BlockBytes: 4 * kiB, Seed: i})
		must(t, err)
		writers = append(writers, writer)
	}
	said := false
	_, err := v.AwaitHealth(ctx, func(all []*volumepb.Condition) bool {
		if !accessible(all) {
			t.Errorf("a slow disk is %v", conditions(all))
		}
		said = said || slow(all)
		return said || t.Failed()
	})
	must(t, err)
	for _, writer := range writers {
		must(t, writer.Stop(ctx))
	}
	must(t, v.Heal(limited(t)))
	must(t, v.Slow(limited(t), 4))
	must(t, g.Agent().ResizeVolume(ctx, v.GuestPath, disks["ext4"]+4*miB)) // half a group
	must(t, v.Heal(limited(t)))
	healed(t, v)
}

// healed waits until the volume has no condition, for up to an examination's interval on an idle
// volume.
func healed(t *testing.T, v *vm.Volume) {
	t.Helper()
	_, err := v.AwaitHealth(within(t, jobLimit), nothing)
	must(t, err)
}

// One write fails, and later writes work again. A program that does not check has lost its data.
// The agent remembers the failure although nothing has shut down.
func TestWriteThatFailsOnceIsRemembered(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		failOneWrite(t, g, v)
		must(t, v.Touch(limited(t)))
		remount(t, v)
		isHealthy(t, v)
	})
}

// failOneWrite makes one write of a file's content fail, and returns when the agent has remembered
// the failure. The kernel logs at most ten failures of all disks in five seconds, so several writes
// may have to fail.
func failOneWrite(t *testing.T, g *vm.Guest, v *vm.Volume) {
	t.Helper()
	ctx := within(t, jobLimit)
	path := v.GuestPath + "/fails"
	for ctx.Err() == nil {
		must(t, g.Remote.WriteFile(ctx, path, []byte("whole")))
		must(t, g.Remote.Sync(ctx, v.GuestPath))
		where, err := g.Remote.DiskOffset(ctx, path)
		must(t, err)
		must(t, v.BreakNextWrite(ctx, where))
		must(t, g.Remote.WriteAt(ctx, path, 0, make([]byte, 4*kiB)))
		if err := g.Remote.Sync(ctx, v.GuestPath); err != nil {
			t.Logf("who looks learns: %v", err)
		}
		must(t, v.Heal(ctx))
		soon, cancel := context.WithTimeout(ctx, 6*time.Second)
		_, err = v.AwaitHealth(soon, func(all []*volumepb.Condition) bool {
			if hasShutDown(all) {
				t.Errorf("it has not shut down: %v", conditions(all))
			}
			return failedOnce(all)
		})
		cancel()
		if err == nil {
			return
		}
	}
	t.Fatal("a write that has failed is not remembered")
}

// A mount by another program may be unmounted by that program at any moment, so the agent does not
// write to it.
func TestForeignMountIsWatchedWithoutAWrite(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		device, at := foreign(t, g, fstype)
		ctx := within(t, jobLimit)
		mount := remote.Mount{Source: device, Target: at, FSType: fstype, Data: map[string]string{"ext4": "noinit_itable"}[fstype]}
		must(t, g.Remote.Mount(ctx, mount))
		must(t, g.Remote.Sync(ctx, at))
		before := writes(t, g, device)
		_, err := g.Agent().GetVolumeStats(ctx, at)
		must(t, err)
		if after := writes(t, g, device); after != before {
			t.Errorf("writes to the disk\nwant %s\ngot  %s", before, after)
		}
		must(t, g.Remote.Unmount(ctx, at, 0))
		for range 10 {
			must(t, g.Remote.Mount(ctx, mount))
			_, err := g.Agent().GetVolumeHealth(ctx, at)
			must(t, err)
			if err := g.Remote.Unmount(ctx, at, 0); err != nil {
				t.Fatalf("its owner cannot unmount it: %v", err)
			}
		}
	})
}

// A mount in the place of another is another volume, although the kernel reuses the number of the
// earlier mount.
func TestMountInThePlaceOfAnotherHasAHealthOfItsOwn(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		device, at := foreign(t, g, fstype)
		ctx := within(t, jobLimit)
		for range 3 {
			must(t, g.Remote.Mount(ctx, remote.Mount{Source: device, Target: at, FSType: fstype}))
			if found, err := g.Agent().GetVolumeHealth(ctx, at); err != nil || len(found) > 0 {
				t.Fatalf("a fresh mount\nwant nothing wrong\ngot  %v, error %v", conditions(found), err)
			}
			if fstype == "xfs" { // on 6.1 only a failing write shows that an ext4 has shut down
				must(t, g.Remote.Unmount(ctx, at, 0))
				must(t, g.Remote.Mount(ctx, remote.Mount{Source: device, Target: at, FSType: fstype}))
				must(t, g.Remote.ShutdownFS(ctx, at, 0))
				if found, err := g.Agent().GetVolumeHealth(ctx, at); err != nil || !hasShutDown(found) {
					t.Fatalf("an xfs that has shut down\nwant the condition\ngot  %v, error %v", conditions(found), err)
				}
			}
			must(t, g.Remote.Unmount(ctx, at, 0))
		}
		must(t, g.Remote.Mount(ctx, remote.Mount{Source: device, Target: at, FSType: fstype})) // so that its log is replayed
		must(t, g.Remote.Unmount(ctx, at, 0))
	})
}

// foreign returns a disk that the agent has not mounted, and a folder to mount it on.
func foreign(t *testing.T, g *vm.Guest, fstype string) (device, at string) {
	t.Helper()
	v := newVolume(t, g, fstype)
	must(t, g.Attach(limited(t), v.Volume))
	disk, _ := g.VM().Disk(v.DiskID())
	at = "/run/test/foreign-" + v.ID
	must(t, g.Remote.Mkdir(limited(t), at, 0o755))
	// The agent can tell where the disk is: it is mounted and unmounted once for that.
	storage := &agentpb.Storage{Driver: "blk", Source: disk.PCIPath, Fstype: fstype, MountPoint: "/run/test/" + v.ID}
	must(t, container(t, g, v.ID, storage))
	v.GuestPath = storage.MountPoint
	device = sizes(t, v).Device
	remove(t, g, v.ID)
	v.GuestPath = ""
	return device, at
}

// umount(2) hides a mount before it waits for the disk, so the agent calls it only after the disk
// has answered.
func TestRemoveOfAVolumeThatHangsLeavesItInSight(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := hangable(t, g, fstype)
		device := path.Base(sizes(t, v).Device)
		must(t, g.Remote.WriteFile(limited(t), v.GuestPath+"/dirty", make([]byte, 64*kiB)))
		must(t, v.Hang(limited(t)))
		for range 2 {
			err := answered(t, func(ctx context.Context) error { return g.Agent().RemoveContainer(ctx, v.Container()) })
			refused(t, err, codes.DeadlineExceeded, device)
			if !vmtest.IsMounted(t, g, v.GuestPath) || stats(t, v).Usage[0].Total == 0 {
				t.Error("it is out of sight")
			}
		}
		must(t, v.Answer())
		until(t, func() bool { return g.Agent().RemoveContainer(limited(t), v.Container()) == nil })
		if vmtest.IsMounted(t, g, v.GuestPath) {
			t.Error("it is still mounted")
		}
		must(t, v.Mount(limited(t)))
		if read, err := g.Remote.ReadFile(limited(t), v.GuestPath+"/dirty"); err != nil || len(read) != 64*kiB {
			t.Errorf("what was written before\nwant it whole\ngot  %d bytes, error %v", len(read), err)
		}
	})
}

// A disk hangs before it is mounted: each attempt is answered, and all attempts wait with one
// thread.
func TestCreateOnADiskThatHangsIsAnsweredAndGoesOn(t *testing.T) {
	g := guest(t)
	v, storage := attached(t, g, "xfs")
	must(t, v.Serve(limited(t)))
	healsAtEnd(t, v)
	must(t, v.Hang(limited(t)))
	create := func(ctx context.Context) error {
		return g.Agent().CreateContainer(ctx, &agentpb.CreateContainerRequest{ContainerId: v.ID, Storages: []*agentpb.Storage{storage}})
	}
	for range 3 {
		refused(t, answered(t, create), codes.DeadlineExceeded)
		waitsWithOneThread(t, g)
	}
	must(t, v.Answer())
	until(t, func() bool { return create(limited(t)) == nil })
	if !vmtest.IsMounted(t, g, storage.MountPoint) {
		t.Error("it is not mounted")
	}
	remove(t, g, v.ID)
}

// waitsWithOneThread checks that only one thread of the agent waits for the hanging disk. Other
// threads may be in the kernel for a moment.
func waitsWithOneThread(t *testing.T, g *vm.Guest) {
	t.Helper()
	var found remote.ThreadStates
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for range 100 {
		var err error
		found, err = g.Remote.Threads(limited(t), remote.Agent)
		must(t, err)
		if found.Waiting() <= 1 {
			return
		}
		<-again.C
	}
	t.Errorf("threads that wait for the disk\nwant 1 at most\ngot  %d of %d", found.Waiting(), len(found.States))
}

// DestroySandbox names the hanging disk, ends a waiting create, and leaves the sandbox as it was.
func TestDestroyNamesTheDiskThatHangs(t *testing.T) {
	g := vmtest.Boot(t, vm.Options{})
	var all []*vm.Volume
	for i, fstype := range []string{"ext4", "ext4", "xfs"} {
		v, err := g.Volume(limited(t), fmt.Sprintf("volume-%d", i), fstype, int64(disks[fstype]))
		must(t, err)
		must(t, g.Attach(limited(t), v.Volume))
		all = append(all, v)
	}
	fine, v := all[0], all[2]
	must(t, fine.Mount(limited(t)))
	must(t, v.Mount(limited(t)))
	must(t, v.Serve(limited(t)))
	device := path.Base(sizes(t, v).Device)
	must(t, g.Remote.WriteFile(limited(t), v.GuestPath+"/dirty", make([]byte, 64*kiB)))
	before := vmtest.Mounts(t, g)
	must(t, v.Hang(limited(t)))
	third, _ := g.VM().Disk(all[1].DiskID())
	first := &agentpb.Storage{Driver: "blk", Source: third.PCIPath, Fstype: "ext4", MountPoint: "/run/test/first"}
	missing := &agentpb.Storage{Driver: "blk", Source: "02/1f", Fstype: "ext4", MountPoint: "/run/test/missing"}
	created := make(chan error, 1)
	go func() { created <- container(t, g, "waits", first, missing) }()
	until(t, func() bool { return vmtest.IsMounted(t, g, first.MountPoint) })
	refused(t, answered(t, g.Agent().DestroySandbox), codes.DeadlineExceeded, device)
	refused(t, <-created, codes.FailedPrecondition, "DestroySandbox")
	if got := vmtest.Mounts(t, g); got != before {
		t.Errorf("mounts\nwant %s\ngot  %s", before, got)
	}
	isHealthy(t, fine)
	must(t, v.Answer())
	becomes(t, v, nothing)
	must(t, v.Heal(limited(t))) // QEMU ends with the sandbox, but the server of the store would not
	must(t, g.Agent().DestroySandbox(limited(t)))
}

// hasGraphLock reports whether a guest's QEMU changes no disk while a request of another one is in
// flight (host/qemu).
func hasGraphLock(g *vm.Guest) bool { return g.VM().QMP().Version().Major >= 8 }

// QEMU 7.2 still serves other disks. A later one would stop the guest, for a server that QEMU reads
// itself: then its requests are those of no thread, and host/qemu does not see them.
func TestVolumeGrowsBesideOneThatHangs(t *testing.T) {
	g := guest(t)
	if hasGraphLock(g) {
		t.Skip("this QEMU would stand still (run it with QEMU 7.2; TestGuestGoesOnBesideAStoreThatHangs is for any QEMU)")
	}
	v, other := hangable(t, g, "ext4"), mounted(t, g, "ext4")
	must(t, v.Hang(limited(t)))
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	refused(t, g.Agent().ResizeVolume(short, v.GuestPath, 0), codes.DeadlineExceeded)
	becomes(t, v, hung) // with requests in flight
	must(t, other.Resize(limited(t), 2*sizes(t, other).DeviceBytes))
	isHealthy(t, other)
	must(t, v.Answer())
	becomes(t, v, nothing)
}

// Any number of calls of any kind on a hanging volume wait with one thread, and calls of other
// volumes are answered.
func TestVolumeThatHangsKeepsOneThread(t *testing.T) {
	const calls, atOnce, short = 1000, 25, 100 * time.Millisecond
	g := guest(t)
	v, other := hangable(t, g, "ext4"), mounted(t, g, "xfs")
	before, err := g.Remote.Threads(limited(t), remote.Agent)
	must(t, err)
	must(t, g.Remote.WriteFile(limited(t), v.GuestPath+"/dirty", make([]byte, 64*kiB)))
	must(t, v.Hang(limited(t)))
	shown := func(kind string, failed int) error {
		waitsWithOneThread(t, g)
		now, err := g.Remote.Threads(limited(t), remote.Agent)
		t.Logf("%d calls of %s, %d failed: %d threads, %d of them wait; before %d", calls, kind, failed, len(now.States), now.Waiting(), len(before.States))
		return err
	}
	must(t, v.Flooded(t.Context(), calls, atOnce, short, shown))
	for kind, call := range map[string]func(context.Context) error{
		"GetVolumeStats":            func(ctx context.Context) error { _, err := v.Stats(ctx); return err },
		"GetVolumeHealth":           func(ctx context.Context) error { _, err := v.Health(ctx); return err },
		"GetVolumeStats of another": func(ctx context.Context) error { _, err := other.Stats(ctx); return err },
		"Check":                     g.Agent().Check,
	} {
		failed := vm.Flood(t.Context(), calls, atOnce, vm.Limit(callLimit), call)
		if must(t, shown(kind, failed)); failed > 0 {
			t.Errorf("%d calls of %s failed", failed, kind)
		}
	}
	_, storage := attached(t, g, "ext4")
	must(t, container(t, g, "beside", storage))
	remove(t, g, "beside")
	must(t, v.Answer())
	healed(t, v)
	until(t, func() bool { return v.Unmount(limited(t)) == nil })
	must(t, v.Mount(limited(t)))
}

// The store is a file on the host, and a write to it does not end. With QEMU 8 and later the other
// volume may not grow meanwhile, because the whole guest would stop.
func TestGuestGoesOnBesideAStoreThatHangs(t *testing.T) {
	g := guest(t)
	dir, freeze, thaw := trialtest.Freezable(t, 2*int64(disks["ext4"]))
	v, other := volumeIn(t, g, dir, "ext4"), mounted(t, g, "ext4")
	must(t, v.Mount(limited(t)))
	writer := written(t, v, 0)
	t.Cleanup(thaw) // runs before the volume is detached
	freeze()
	becomes(t, v, hung)
	bytes := 2 * sizes(t, other).DeviceBytes
	err := other.Resize(limited(t), bytes)
	switch {
	case !hasGraphLock(g):
		must(t, err)
	case !errors.Is(err, sandbox.ErrStoreHangs) || !strings.Contains(err.Error(), "volume "+v.ID+" hangs"):
		t.Errorf("a growth\nwant %v, by volume %s\ngot  %v", sandbox.ErrStoreHangs, v.ID, err)
	}
	isHealthy(t, other) // the agent answers
	thaw()
	must(t, writer.Stop(limited(t))) // before it has filled the volume
	becomes(t, v, nothing)
	must(t, other.Resize(limited(t), bytes))
	freshlyVerified(t, v, writer.Ledger().Bytes())
}
