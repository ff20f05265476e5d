package volumes

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

// shownBy is more than twice the promised 10 s from a fault to an abnormal condition. The time is
// the agent's own, the same on any machine, and less than the 30 s after which the agent examines
// an idle volume anyway.
const shownBy = 25 * time.Second

// written starts a writer, which ends at limit if that is not 0, and returns when some blocks have
// been acknowledged.
func written(t *testing.T, v *vm.Volume, limit uint64) *remote.Writer {
	t.Helper()
	ctx := within(t, jobLimit)
	writer, err := v.StartWriter(ctx, limit)
	must(t, err)
	must(t, writer.Await(ctx, 2*miB))
	return writer
}

// fails waits until a writer has met its fault.
func fails(t *testing.T, writer *remote.Writer) {
	t.Helper()
	select {
	case <-writer.Done():
		if err := writer.Err(); err == nil || errors.Is(err, unix.ENOSPC) {
			t.Fatalf("the writer\nwant it to meet the fault\ngot  %v", err)
		}
	case <-limited(t).Done():
		t.Fatal("the writer has met no fault")
	}
}

func remount(t *testing.T, v *vm.Volume) {
	t.Helper()
	must(t, v.Unmount(limited(t)))
	must(t, v.Mount(limited(t)))
}

// The kernel limits its log for all devices together. Two faults occur after a third disk has
// filled the log: both must be reported, and no fault of any other volume.
func TestSimultaneousFaultsAreAllReported(t *testing.T) {
	g := guest(t)
	ext4, xfs, bystander := mounted(t, g, "ext4"), mounted(t, g, "xfs"), mounted(t, g, "xfs")
	must(t, ext4.Resize(limited(t), 8*disks["ext4"])) // room for all data until the fault
	stormy, storm := fillLog(t, g)
	first, second, third := written(t, ext4, 0), written(t, xfs, 0), written(t, bystander, 32*miB)
	storm()
	must(t, ext4.BreakWrites(limited(t)))
	fails(t, first)
	must(t, xfs.BreakWrites(limited(t)))
	fails(t, second)
	becomes(t, xfs, hasShutDown)
	becomes(t, ext4, inaccessible)
	becomes(t, ext4, hasErrors) // its journal meets the fault some seconds later
	must(t, third.Await(within(t, jobLimit), 32*miB))
	isHealthy(t, bystander)

	for _, v := range []*vm.Volume{ext4, xfs, stormy} {
		must(t, v.Heal(limited(t)))
		remount(t, v)
	}
	isHealthy(t, xfs)
	must(t, ext4.Touch(limited(t)))
	remembers(t, g, ext4)
	for _, v := range []*vm.Volume{ext4, stormy} {
		repair(t, v)
		isHealthy(t, v)
	}
	freshlyVerified(t, ext4, first.Ledger().Bytes())
	freshlyVerified(t, xfs, second.Ledger().Bytes())
	freshlyVerified(t, bystander, third.Ledger().Bytes())
}

// fillLog returns a volume, and a function that breaks it under more writers than the kernel logs
// lines in five seconds (ten). The acknowledged blocks are not compared: on 6.1, if several
// processes call fsync, one fsync was seen to report success although another fsync had just failed
// to commit the transaction of both; see TestShutdownIsAConditionUntilItIsMountedAgain.
func fillLog(t *testing.T, g *vm.Guest) (v *vm.Volume, storm func()) {
	t.Helper()
	v = mounted(t, g, "ext4")
	must(t, v.Resize(limited(t), 8*disks["ext4"])) // room for all data until the fault
	return v, func() {
		t.Helper()
		var writers []*remote.Writer
		for range 8 {
			writers = append(writers, written(t, v, 0))
		}
		must(t, v.BreakWrites(limited(t)))
		for _, writer := range writers {
			fails(t, writer)
		}
	}
}

// repair runs e2fsck on the detached disk, and mounts it again.
func repair(t *testing.T, v *vm.Volume) {
	t.Helper()
	must(t, v.Detach(limited(t)))
	_, err := vm.Repair(limited(t), v.Path)
	must(t, err)
	must(t, v.Mount(limited(t)))
}

// remembers checks the behaviour of an ext4 with recorded errors.
func remembers(t *testing.T, g *vm.Guest, v *vm.Volume) {
	t.Helper()
	if found, err := v.Health(limited(t)); err != nil || !hasErrors(found) {
		t.Errorf("want recorded errors\ngot  %v, error %v", conditions(found), err)
	}
	goal := sizes(t, v).DeviceBytes + 16*miB
	must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
	before := extent(t, g, v)
	refused(t, resize(t, g, v, goal), codes.FailedPrecondition, v.GuestPath, "records errors", "e2fsck")
	if got := extent(t, g, v); got != before {
		t.Errorf("it changed\nwant %+v\ngot  %+v", before, got)
	}
}

// A volume never ends its VM, even if its superblock asks for that.
func TestExt4WhoseErrorsPanicIsMountedReadOnlyInstead(t *testing.T) {
	g := guest(t)
	v := newVolume(t, g, "ext4")
	if out, err := exec.CommandContext(limited(t), "tune2fs", "-e", "panic", v.Path).CombinedOutput(); err != nil {
		t.Fatalf("tune2fs: %v\n%s", err, out)
	}
	v.Options = []string{"errors=panic"}
	refused(t, v.Mount(limited(t)), codes.InvalidArgument, "errors=panic", "errors=remount-ro")
	must(t, v.Detach(limited(t)))
	v.Options = nil
	must(t, v.Mount(limited(t)))
	writer := written(t, v, 0)
	must(t, v.BreakWrites(limited(t)))
	fails(t, writer)
	becomes(t, v, hasErrors)
	must(t, v.Heal(limited(t)))
	remount(t, v)
	repair(t, v)
	isHealthy(t, v)
}

func TestErrorThatExt4RecordsIsAConditionUntilE2fsck(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4")
	isHealthy(t, v)
	trigger := "/sys/fs/ext4/" + path.Base(sizes(t, v).Device) + "/trigger_fs_error"
	must(t, g.Remote.WriteFile(limited(t), trigger, []byte("provoked")))
	becomes(t, v, hasErrors)
	must(t, v.Touch(limited(t))) // errors=continue, mkfs's default
	remembers(t, g, v)
	remount(t, v)
	remembers(t, g, v)
	repair(t, v)
	isHealthy(t, v)
	must(t, resize(t, g, v, 0))
}

func TestShutdownIsAConditionUntilItIsMountedAgain(t *testing.T) {
	const flushJournal = 1
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		writer := written(t, v, 0)
		goal := disks[fstype] + 16*miB
		must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
		must(t, g.Remote.ShutdownFS(limited(t), v.GuestPath, flushJournal))
		fails(t, writer)
		if fstype == "ext4" {
			// On 6.1 and 7.3, the fsync of the last acknowledged block may report success although
			// the journal was aborted before it wrote the block's transaction: kjournald "commits"
			// such a transaction without writing, and jbd2_complete_transaction does not ask
			// whether the journal is aborted. No block before it may be lost.
			writer.Ledger().Forget(writer.Ledger().Blocks() - 1)
		}
		becomes(t, v, map[string]func([]*volumepb.Condition) bool{"ext4": failsWrites, "xfs": hasShutDown}[fstype]) // ext4 on 6.1 shows a shutdown only by failing writes
		if total := stats(t, v).Usage[0].Total; total == 0 || total > disks[fstype] {
			t.Errorf("stats of what has shut down: %d bytes in all", total)
		}
		refused(t, resize(t, g, v, goal), codes.FailedPrecondition, v.GuestPath, "mount it again")
		remount(t, v)
		isHealthy(t, v)
		must(t, resize(t, g, v, goal))
		freshlyVerified(t, v, writer.Ledger().Bytes())
	})
}

// A btrfs whose data cannot be written goes on. When its metadata cannot be written, it makes
// itself read-only, and records nothing.
func TestBtrfsThatStopsIsReadOnlyUntilItIsMountedAgain(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "btrfs")
	goal := disks["btrfs"] + 64*miB
	must(t, g.VM().ResizeDisk(limited(t), v.DiskID(), goal))
	writer := written(t, v, 0)
	must(t, v.BreakWrites(limited(t)))
	fails(t, writer)
	becomes(t, v, failsWrites)
	if err := g.Remote.Sync(limited(t), v.GuestPath); err == nil {
		t.Error("its transaction was committed to a disk that fails")
	}
	becomes(t, v, stopped)
	refused(t, resize(t, g, v, goal), codes.FailedPrecondition, v.GuestPath, "mount it again")
	must(t, v.Heal(limited(t)))
	becomes(t, v, stopped) // it stays so
	remount(t, v)
	isHealthy(t, v)
	must(t, resize(t, g, v, goal))
	freshlyVerified(t, v, writer.Ledger().Bytes())
}

// pull detaches a volume's disk from the machine without the host package's knowledge.
func pull(t *testing.T, g *vm.Guest, v *vm.Volume) {
	t.Helper()
	disk, _ := g.VM().Disk(v.DiskID())
	must(t, g.VM().QMP().Execute(limited(t), "device_del", map[string]string{"id": disk.Device}, nil))
}

func TestUnpluggedDiskIsAConditionAndCanBeUnmounted(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		writer := written(t, v, 0)
		pull(t, g, v)
		fails(t, writer)
		becomes(t, v, isGone)
		if total := stats(t, v).Usage[0].Total; total == 0 {
			t.Error("no stats of what has lost its disk")
		}
		must(t, v.Detach(limited(t)))
		must(t, v.Mount(limited(t)))
		isHealthy(t, v)
		freshlyVerified(t, v, writer.Ledger().Bytes())
	})
}

// A full volume has not failed, and is healthy again when it has space.
func TestFullVolumeIsAConditionUntilThereIsRoom(t *testing.T) {
	g := guest(t)
	v := mounted(t, g, "ext4")
	writer := written(t, v, 0)
	ctx := within(t, jobLimit)
	select {
	case <-writer.Done():
	case <-ctx.Done():
		t.Fatal("the volume is not full yet")
	}
	if err := writer.Err(); err == nil || !strings.Contains(err.Error(), unix.ENOSPC.Error()) {
		t.Errorf("the writer\nwant %v\ngot  %v", unix.ENOSPC, err)
	}
	becomes(t, v, isFull)
	must(t, resize(t, g, v, 0))
	must(t, v.Resize(ctx, 2*disks["ext4"]))
	_, err := v.AwaitCondition(ctx, vm.Healthy)
	must(t, err)
	freshlyVerified(t, v, writer.Ledger().Bytes())
}

// The agent examines a read-only mount without writing. The mount is made without the agent, so the
// first question causes its first examination.
func TestReadOnlyMountIsHealthyAndNotWrittenTo(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		device := sizes(t, v).Device
		must(t, v.Unmount(limited(t)))
		ctx := limited(t)
		const path = "/run/test/read-only"
		must(t, g.Remote.Mkdir(ctx, path, 0o755))
		must(t, g.Remote.Mount(ctx, remote.Mount{Source: device, Target: path, FSType: fstype, Flags: unix.MS_RDONLY}))
		before := writes(t, g, device)
		answer, err := g.Agent().GetVolumeStats(ctx, path)
		must(t, err)
		if answer.VolumeCondition.Abnormal {
			t.Errorf("its condition is %v", answer.VolumeCondition)
		}
		if after := writes(t, g, device); after != before {
			t.Errorf("writes to the disk\nwant %s\ngot  %s", before, after)
		}
		must(t, g.Remote.Unmount(ctx, path, 0))
	})
}

// writes returns the number of writes that the guest's kernel has sent to a device
// (Documentation/block/stat.rst).
func writes(t *testing.T, g *vm.Guest, device string) string {
	t.Helper()
	stat, err := g.Remote.ReadFile(limited(t), "/sys/class/block/"+path.Base(device)+"/stat")
	must(t, err)
	return strings.Fields(string(stat))[4]
}

// A volume that was made read-only on purpose is healthy, also for a watch that knew it as
// writable.
func TestReadOnlyRemountStaysHealthy(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := mounted(t, g, fstype)
		device := sizes(t, v).Device
		remountReadOnly(t, g, v)
		// The watch examines the volume when the kernel's log names its device. No event announces
		// the end of the examination, so the test waits for a while.
		must(t, g.Remote.WriteFile(limited(t), "/dev/kmsg", []byte("look at "+path.Base(device))))
		again := time.NewTicker(100 * time.Millisecond)
		defer again.Stop()
		for range 10 {
			<-again.C
			isHealthy(t, v)
		}
	})
}

// remountReadOnly remounts a volume read-only. The kernel refuses that while the agent's probe has
// its file open for writing, whose end no event announces, so it tries repeatedly.
func remountReadOnly(t *testing.T, g *vm.Guest, v *vm.Volume) {
	t.Helper()
	ctx := limited(t)
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		err := g.Remote.Mount(ctx, remote.Mount{Target: v.GuestPath, Flags: unix.MS_REMOUNT | unix.MS_RDONLY})
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EBUSY) {
			t.Fatal(err)
		}
		<-again.C
	}
}

func TestReadOnlyDiskIsMountedAndHealthy(t *testing.T) {
	everyFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v := newVolume(t, g, fstype)
		v.ReadOnly = true
		must(t, v.Mount(limited(t)))
		isHealthy(t, v)
		if err := g.Remote.WriteFile(limited(t), v.GuestPath+"/file", nil); err == nil {
			t.Error("a file could be made on a read-only volume")
		}
	})
}

// notAsBefore accepts the condition of a volume whose disk was smaller for a while. An xfs may also
// have shut down, because its log lies in the middle of the disk.
func notAsBefore(all []*volumepb.Condition) bool {
	return wasTooSmall(all) || hasShutDown(all) && !isTooSmall(all)
}

// The store of a volume is made smaller under its mount, which QEMU does on request.
func TestDiskShrunkBelowItsFilesystemIsReportedAndNotGrown(t *testing.T) {
	eachFilesystem(t, func(t *testing.T, g *vm.Guest, fstype string) {
		v, err := g.Volume(limited(t), "cut-"+fstype, fstype, int64(disks[fstype]))
		must(t, err)
		must(t, v.Mount(limited(t)))
		t.Cleanup(func() { // its content is lost
			ctx, cancel := context.WithTimeout(context.Background(), vm.Limit(callLimit))
			defer cancel()
			if err := errors.Join(v.Detach(ctx), os.Remove(v.Path)); err != nil {
				t.Error(err)
			}
		})
		for _, step := range []struct {
			bytes uint64
			says  func([]*volumepb.Condition) bool
		}{{disks[fstype] / 2, isTooSmall}, {disks[fstype], notAsBefore}} {
			must(t, g.VM().QMP().Execute(limited(t), "block_resize", map[string]any{"node-name": qemu.RawNode(v.DiskID()), "size": step.bytes}, nil))
			becomes(t, v, step.says)
			refused(t, resize(t, g, v, 0), codes.FailedPrecondition, v.GuestPath)
			refused(t, v.Resize(limited(t), 2*disks[fstype]), codes.FailedPrecondition, v.GuestPath)
			if info, err := os.Stat(v.Path); err != nil || uint64(info.Size()) != step.bytes {
				t.Errorf("its disk\nwant %d bytes still\ngot  %v, error %v", step.bytes, info, err)
			}
		}
	})
}
