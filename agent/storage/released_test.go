package storage

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount/mounttest"
	"github.com/directvol/directvol/protocols/agentpb"
)

// loopExt4 returns a loop device with an ext4.
func loopExt4(t *testing.T) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 16<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", image).CombinedOutput(); err != nil {
		t.Skipf("no ext4 (install e2fsprogs): %v %s", err, out)
	}
	out, err := exec.Command("losetup", "--find", "--show", image).Output()
	if err != nil {
		t.Skipf("no loop device (run as root, where the kernel has loop): losetup: %v", err)
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "--detach", device).Run() })
	return device
}

// An OK of RemoveContainer is no promise for the device if another container holds the same
// storage. CheckReleased is that promise, for a host that then removes the disk.
func TestDeviceIsReleasedWhenNobodyUsesIt(t *testing.T) {
	device := loopExt4(t)
	table := stateful(t, filepath.Join(t.TempDir(), "state"))
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	all := []*agentpb.Storage{{Driver: "blk", Source: device, Fstype: "ext4", MountPoint: filepath.Join(dir, "volume")}}
	check := func(when string, want errkind.Kind, words string) {
		t.Helper()
		err := table.CheckReleased(t.Context(), "blk", device)
		if (err == nil) != (words == "") || err != nil && (errkind.Of(err) != want || !strings.Contains(err.Error(), words)) {
			t.Errorf("%s\nwant %q of kind %v\ngot  %v", when, words, want, err)
		}
	}
	check("before", 0, "")
	for _, holder := range []string{"first", "second"} {
		if err := table.Hold(t.Context(), holder, all, func() bool { return true }); err != nil {
			t.Skipf("no mounts (run as root): %v", err)
		}
	}
	if err := table.Release(t.Context(), "first"); err != nil {
		t.Fatal(err)
	}
	check("with another holder", errkind.FailedPrecondition, "container second")
	if err := table.Release(t.Context(), "second"); err != nil {
		t.Fatal(err)
	}
	check("when all have gone", 0, "")
	user, err := claim(device)
	if err != nil {
		t.Fatal(err)
	}
	check("while somebody has it for himself", errkind.FailedPrecondition, "in use")
	user.Close()
	check("afterwards", 0, "")
}

func TestDeviceThatIsNotThereIsReleased(t *testing.T) {
	table := stateful(t, filepath.Join(t.TempDir(), "state"))
	for _, source := range []string{"/dev/directvol-none", "1f/1f"} {
		if err := table.CheckReleased(t.Context(), "blk", source); err != nil {
			t.Errorf("%s: %v", source, err)
		}
	}
	for _, driver := range []string{"", "local", "none"} {
		if err := table.CheckReleased(t.Context(), driver, "1f/1f"); errkind.Of(err) != errkind.InvalidArgument {
			t.Errorf("driver %q: %v", driver, err)
		}
	}
}

// While a destroy is in progress that may fail and mount the volume again, the volume's device is
// not released.
func TestDeviceOfAVolumeThatMayComeBackIsNotReleased(t *testing.T) {
	place := filepath.Join(mounttest.Dir(t), "place")
	disk := mounttest.Attach(t, mounttest.Image(t, "xfs"))
	table := newTable()
	if err := hold(t, table, onDisk(disk, "xfs", place)); err != nil {
		t.Fatal(err)
	}
	leaving := table.leave(t.Context(), table.heldBy(func(*mounted) bool { return true }))
	if err := leaving.await(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := table.CheckReleased(ctx, "blk", disk); errkind.Of(err) != errkind.DeadlineExceeded {
		t.Errorf("unmounted, and not decided\nwant no answer in time\ngot  %v", err)
	}
	leaving.decide(false)
	if err := table.CheckReleased(t.Context(), "blk", disk); errkind.Of(err) != errkind.FailedPrecondition {
		t.Errorf("mounted again\nwant it refused\ngot  %v", err)
	}
	if err := table.Release(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
	if err := table.CheckReleased(t.Context(), "blk", disk); err != nil {
		t.Errorf("after its release: %v", err)
	}
}
