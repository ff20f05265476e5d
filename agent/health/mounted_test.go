package health

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/mount/mounttest"
)

// onDisk mounts a new filesystem and returns it as a target.
func onDisk(t *testing.T, fstype, data string) Target {
	t.Helper()
	return onImage(t, mounttest.Image(t, fstype), fstype, data)
}

func onImage(t *testing.T, image, fstype, data string) Target {
	t.Helper()
	dir := mounttest.Dir(t)
	disk := mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, fstype, 0, data)
	device, err := blockdev.ByPath(disk)
	if err != nil {
		t.Fatal(err)
	}
	top, err := mount.Topmost(dir)
	if err != nil {
		t.Fatal(err)
	}
	return Target{Mountpoint: dir, FSType: fstype, Device: device, Mount: mount.Identify(top)}
}

// finds checks that an examination finds a condition, both as the owner and without writing.
func finds(t *testing.T, target Target, status Status, reason string) {
	t.Helper()
	for _, owned := range []bool{true, false} {
		f := examine(target, owned, false)
		found := false
		for _, c := range f.conditions {
			found = found || c.Status == status && c.Reason == reason
		}
		if !found {
			t.Errorf("owned %v\nwant %v %s\ngot  %+v", owned, status, reason, f)
		}
	}
}

func fails(t *testing.T, target Target) {
	t.Helper()
	trigger := filepath.Join("/sys/fs/ext4", target.Device.Name, "trigger_fs_error")
	if err := os.WriteFile(trigger, []byte("provoked"), 0); err != nil {
		t.Skipf("it needs to provoke an error: %v: run it as root", err)
	}
}

func TestExt4WithRecordedErrorsIsDegraded(t *testing.T) {
	target := onDisk(t, "ext4", "errors=continue")
	fails(t, target)
	finds(t, target, Degraded, ReasonRecordedErrors)
}

// Some kernels make only the superblock read-only when an ext4 meets an error, and not the mount.
// The test does that by hand, because not every kernel does.
func TestExt4WhoseSuperblockIsReadOnlyAfterAnErrorIsInaccessible(t *testing.T) {
	target := onDisk(t, "ext4", "errors=continue")
	readOnly := func() {
		t.Helper()
		config, err := unix.Fspick(unix.AT_FDCWD, target.Mountpoint, unix.FSPICK_CLOEXEC)
		if err == nil {
			defer unix.Close(config)
			err = unix.FsconfigSetFlag(config, "ro")
		}
		if err == nil {
			err = unix.FsconfigReconfigure(config)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	readOnly()
	if f := examine(target, true, false); len(f.conditions) > 0 || f.failure != nil {
		t.Errorf("remounted read-only by somebody\nwant nothing wrong\ngot  %+v", f)
	}
	if err := unix.Mount("", target.Mountpoint, "", unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	fails(t, target)
	readOnly()
	finds(t, target, Inaccessible, ReasonReadOnly)
}

func TestXFSShutdownIsReadFromTheFilesystem(t *testing.T) {
	target := onDisk(t, "xfs", "")
	if f := examine(target, true, false); len(f.conditions) > 0 || f.failure != nil {
		t.Errorf("want nothing wrong\ngot  %+v", f)
	}
	dir, err := os.Open(target.Mountpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	const goingDown = 0x8004587d // XFS_IOC_GOINGDOWN, with the flag for no log flush
	if err := unix.IoctlSetPointerInt(int(dir.Fd()), goingDown, 2); err != nil {
		t.Fatal(err)
	}
	finds(t, target, Inaccessible, ReasonShutdown)
}

// An examination of somebody else's mount must not change its disk.
func TestForeignMountIsNotWrittenTo(t *testing.T) {
	for fstype, data := range map[string]string{"ext4": "noinit_itable", "xfs": "", "btrfs": ""} {
		target := onDisk(t, fstype, data)
		dir, err := os.Open(target.Mountpoint)
		if err != nil {
			t.Fatal(err)
		}
		err = unix.Syncfs(int(dir.Fd()))
		dir.Close()
		if err != nil {
			t.Fatal(err)
		}
		before := countsOf(target.Device.Name).writes
		if f := examine(target, false, false); len(f.conditions) > 0 || f.failure != nil {
			t.Errorf("%s: want nothing wrong\ngot  %+v", fstype, f)
		}
		if err := blockdev.Ask(target.Device.Path); err != nil {
			t.Errorf("%s: %v", fstype, err)
		}
		if after := countsOf(target.Device.Name).writes; after != before {
			t.Errorf("%s, writes to its disk\nwant %d\ngot  %d", fstype, before, after)
		}
		mounttest.Unmount(t, target.Mountpoint)
		if f := examine(target, false, false); f.failure == nil || len(f.conditions) > 0 {
			t.Errorf("%s, unmounted\nwant a failure that says so\ngot  %+v", fstype, f)
		}
	}
}

// An ext4 that has remounted itself refuses writes. Newer kernels also show that in mountinfo, and
// all kernels log it.
func TestExt4ThatRemountedItselfIsInaccessible(t *testing.T) {
	target := onDisk(t, "ext4", "errors=remount-ro")
	fails(t, target)
	for _, way := range []struct{ owned, logged bool }{{true, false}, {false, true}} {
		f := examine(target, way.owned, way.logged)
		if len(f.conditions) == 0 || f.conditions[0].Status != Inaccessible || f.conditions[0].Reason != ReasonReadOnly {
			t.Errorf("%+v\nwant %s first\ngot  %+v", way, ReasonReadOnly, f)
		}
	}
}

// Somebody makes a volume read-only while it is being examined: the probe's write is refused, and
// nothing is wrong.
func TestRemountDuringAnExaminationIsNoFault(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs", "btrfs"} {
		target := onDisk(t, fstype, "")
		remount := func(flags uintptr) error { return unix.Mount("", target.Mountpoint, "", unix.MS_REMOUNT|flags, "") }
		for range 100 {
			if err := remount(0); err != nil {
				t.Fatal(err)
			}
			made := make(chan error)
			go func() {
				err := remount(unix.MS_RDONLY)
				for errors.Is(err, unix.EBUSY) { // the probe has its file open
					err = remount(unix.MS_RDONLY)
				}
				made <- err
			}()
			var found []finding
			for range 3 {
				found = append(found, examine(target, true, false))
			}
			if err := <-made; err != nil {
				t.Fatal(err)
			}
			for _, f := range found {
				if len(f.conditions) > 0 || f.failure != nil {
					t.Fatalf("%s\nwant no condition\ngot  %+v", fstype, f)
				}
			}
		}
	}
}

// A filesystem with a server that hangs is mounted over a folder above: that says nothing about the
// disk, which must not be reported as slow.
func TestCoveredVolumeIsLostAndNotSlow(t *testing.T) {
	target := onDisk(t, "xfs", "")
	if f := examine(target, true, false); f.failure != nil || len(f.conditions) > 0 {
		t.Fatalf("in sight\nwant nothing found\ngot  %+v", f)
	}
	release := mounttest.Hang(t, filepath.Dir(target.Mountpoint))
	guard := time.AfterFunc(time.Minute, release) // then all calls that wait for it fail
	if f := examine(target, true, false); !errors.Is(f.failure, errUnmounted) {
		t.Errorf("out of sight\nwant %v\ngot  %+v", errUnmounted, f)
	}
	if !guard.Stop() {
		t.Error("the examination waited for the server")
	}
}

// The disk has become smaller under its mount, for instance because its backing store was
// truncated. A disk that is larger by less than a block is healthy.
func TestDiskSmallerThanItsFilesystemIsInaccessible(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		image := mounttest.Image(t, fstype)
		info, err := os.Stat(image)
		if err != nil {
			t.Fatal(err)
		}
		target, whole := onImage(t, image, fstype, ""), info.Size()
		for _, size := range []int64{whole, whole + 512} {
			mounttest.SetSize(t, target.Device.Path, image, size)
			if f := examine(target, true, false); len(f.conditions) > 0 || f.failure != nil {
				t.Errorf("%s on a disk of %d bytes\nwant nothing wrong\ngot  %+v", fstype, size, f)
			}
		}
		for _, size := range []int64{whole / 2, whole - 512} {
			mounttest.SetSize(t, target.Device.Path, image, size)
			finds(t, target, Inaccessible, ReasonDeviceTooSmall)
		}
	}
}

func TestDiskIsAskedWhileACallOfTheAgentWaitsForIt(t *testing.T) {
	device, err := blockdev.ByPath(mounttest.Attach(t, mounttest.Image(t, "ext4"))) // not mounted: nobody else sends it requests
	if err != nil {
		t.Fatal(err)
	}
	w := &Watch{target: Target{Device: device}, doubted: make(chan struct{}, 1)}
	silent := func() bool { // two looks that find nothing ended
		w.beat(counts{writes: 7}, true)
		w.beat(counts{writes: 7}, true)
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.stall.asked
	}
	if silent() {
		t.Error("the disk is asked though nobody waits for it")
	}
	w.paused.Store(true)
	before := Ended(device.Number)
	if !silent() {
		t.Fatal("the disk is not asked")
	}
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for limit := time.After(time.Minute); Ended(device.Number) == before; {
		select {
		case <-again.C:
		case <-limit:
			t.Fatal("no read reaches the disk")
		}
	}
}
