package poweroff

import (
	"bytes"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

const (
	// slowRate is the speed of a slow disk in bytes per second, and unsyncedBytes the size of a
	// file.
	slowRate, unsyncedBytes = 1 << 20, 2 << 20
	// slowEnd is the time that slow disks need for the dirty data at a guest's end: longer than the
	// limit of any call that unmounts.
	slowEnd = 12 * time.Second
)

// On a signal to end, PID 1 unmounts everything, also under a process that writes, and powers off.
// Afterwards, data that nobody has synced is on the disk.
func TestPID1ThatIsSignalledLosesNothingUnsynced(t *testing.T) {
	endsWithAllUnsynced(t, slowEnd)
}

// endsWithAllUnsynced ends a guest with writers by SIGTERM, and another guest by SIGPWR whose disks
// need the time slow for their dirty data.
func endsWithAllUnsynced(t *testing.T, slow time.Duration) {
	var volumes []sandbox.Volume
	for _, fstype := range []string{"ext4", "xfs"} {
		image, err := vm.Scratch(vmtest.Limited(t), t.TempDir(), fstype, 304<<20)
		vmtest.Must(t, err)
		volumes = append(volumes, sandbox.Volume{ID: fstype, Path: image, FSType: fstype})
	}
	before, files := "", 0
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGPWR, 0} {
		g := vmtest.Boot(t, vm.Options{})
		for _, known := range volumes {
			v := g.Take(known)
			vmtest.Must(t, v.Mount(vmtest.Limited(t)))
			for n := range files {
				want := unsynced(before, n)
				if got, err := g.Remote.ReadFile(vmtest.Limited(t), fmt.Sprintf("%s/%s-%d", v.GuestPath, before, n)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: file %d, written before %s\nwant it there\ngot  %d bytes, error %v", v.FSType, n, before, len(got), err)
				}
			}
			switch signal {
			case syscall.SIGTERM:
				vmtest.Must(t, g.Remote.WriteFile(vmtest.Limited(t), v.GuestPath+"/"+signal.String()+"-0", unsynced(signal.String(), 0)))
				_, err := g.Remote.StartWriter(vmtest.Within(t, vmtest.JobLimit), remote.WriteBlocks{Path: v.GuestPath + "/writer", BlockBytes: 4096, Unsynced: true})
				vmtest.Must(t, err)
			case syscall.SIGPWR:
				vmtest.Must(t, v.SlowTo(vmtest.Limited(t), slowRate))
				keepDirty(t, g)
				for n := range int(slow.Seconds()) * slowRate / unsyncedBytes {
					vmtest.Must(t, g.Remote.WriteFile(vmtest.Limited(t), fmt.Sprintf("%s/%s-%d", v.GuestPath, signal, n), unsynced(signal.String(), n)))
				}
			}
		}
		if signal == 0 {
			g.Kill()
			return
		}
		began := time.Now()
		_, _ = g.Remote.Signal(vmtest.Limited(t), remote.Agent, signal) // the server that answers may have ended
		how, err := g.VM().AwaitShutdown(vmtest.Within(t, vmtest.JobLimit))
		if want := (qemu.Shutdown{Guest: true, Reason: "guest-shutdown"}); err != nil || how != want {
			t.Fatalf("%v\nwant %+v\ngot  %+v, error %v", signal, want, how, err)
		}
		before, files = signal.String(), 1
		if signal == syscall.SIGPWR {
			files = int(slow.Seconds()) * slowRate / unsyncedBytes
			if took := time.Since(began); took < slow/2 { // the data was on the disks earlier
				t.Errorf("ended after %v: nothing is shown", took)
			}
		}
	}
}

// keepDirty stops a guest's kernel from writing data back by itself.
func keepDirty(t *testing.T, g *vm.Guest) {
	t.Helper()
	for setting, value := range map[string]string{"dirty_writeback_centisecs": "0", "dirty_ratio": "90", "dirty_background_ratio": "80"} {
		vmtest.Must(t, g.Remote.WriteFile(vmtest.Limited(t), "/proc/sys/vm/"+setting, []byte(value)))
	}
}

// unsynced returns the content of a file that nobody syncs.
func unsynced(name string, n int) []byte {
	text := fmt.Appendf(nil, "%s %d\n", name, n)
	return bytes.Repeat(text, unsyncedBytes/len(text))
}
