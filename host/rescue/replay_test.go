package rescue

import (
	"context"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// unreplayed makes an ext4 whose superblock says that its journal must still be replayed.
func unreplayed(t *testing.T) string {
	t.Helper()
	path := made(t, "mkfs.ext4", "-q", "-F")
	if out, err := exec.Command("/usr/sbin/debugfs", "-w", "-R", "feature needs_recovery", path).CombinedOutput(); err != nil {
		t.Fatalf("debugfs: %v\n%s", err, out)
	}
	return path
}

// loopDevice makes a loop device over a file until the test ends.
func loopDevice(t *testing.T, path string) string {
	t.Helper()
	out, err := exec.Command("losetup", "--find", "--show", path).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device: losetup: %v: %s: run go test ./host/rescue as root on a host whose kernel has loop devices", err, strings.TrimSpace(string(out)))
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v\n%s", device, err, out)
		}
	})
	return device
}

// replays rescues an ext4 whose mount is refused until e2fsck has replayed the journal, and checks
// the outcome.
func replays(t *testing.T, disk string) {
	t.Helper()
	r := afterVM(t, "ext4", disk)
	must(t, r.disk.Lock())
	var err error
	r.found, err = identify(r.disk.File())
	must(t, err)
	var refused []bool
	r.attempt = func(context.Context) error {
		now, err := identify(r.disk.File())
		must(t, err)
		must(t, r.disk.Unlock())
		refused = append(refused, now.replays)
		if now.replays {
			return errRefused
		}
		return nil
	}
	if err := r.mount(t.Context()); err != nil || !slices.Equal(refused, []bool{true, false}) {
		t.Fatalf("mount\nwant it refused, replayed and mounted\ngot  %v, %v", refused, err)
	}
	if r.report.Replay == nil || r.report.Replay.Command != "e2fsck -p "+disk {
		t.Errorf("report\nwant e2fsck -p in it\ngot  %+v", r.report.Replay)
	}
	if text, err := json.Marshal(r.report); err != nil || !strings.Contains(string(text), `"replay":{"command":"e2fsck -p `) {
		t.Errorf("as JSON\nwant e2fsck -p in it\ngot  %s, error %v", text, err)
	}
	must(t, r.check(t.Context()))
}

func TestJournalIsReplayedWhereTheKernelRefuses(t *testing.T) { replays(t, unreplayed(t)) }

// e2fsck opens a device exclusively. Afterwards the rescue must have the device exclusively again.
func TestJournalOfADeviceIsReplayed(t *testing.T) {
	device := loopDevice(t, unreplayed(t))
	replays(t, device)
}

func TestReplayThatFailsIsSaidOnce(t *testing.T) {
	path := unreplayed(t)
	if out, err := exec.Command("/usr/sbin/debugfs", "-w", "-R", "ssv inodes_count 1", path).CombinedOutput(); err != nil {
		t.Fatalf("debugfs: %v\n%s", err, out)
	}
	r := afterVM(t, "ext4", path)
	r.found.replays = true
	attempts := 0
	r.attempt = func(context.Context) error { attempts++; return errRefused }
	err := r.mount(t.Context())
	if !isRefusal(err) || attempts != 1 || r.report.Replay == nil || strings.Count(err.Error(), " exits ") != 1 {
		t.Errorf("\nwant one attempt, and e2fsck's failure once\ngot  %d, %v", attempts, err)
	}
}
