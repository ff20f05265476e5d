package qemu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
)

func needsQEMU(t *testing.T) {
	t.Helper()
	if _, err := findBinary("qemu-system-x86_64"); err != nil {
		t.Skipf("a real QEMU is wanted: %v (run make test, which installs it)", err)
	}
}

// built is the directory of builtDirectvol's program; TestMain removes it.
var built string

// builtDirectvol builds the program once for all tests, and returns its path.
var builtDirectvol = sync.OnceValues(func() (program string, err error) {
	if built, err = os.MkdirTemp("", "directvol-"); err != nil {
		return "", err
	}
	program = filepath.Join(built, "directvol")
	if out, err := exec.Command("go", "build", "-o", program, "github.com/directvol/directvol/host/cmd/directvol").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build directvol: %w\n%s", err, out)
	}
	return program, nil
})

// realVMs counts the machines, because each needs a vsock address of its own.
var realVMs atomic.Uint32

// realVM starts a machine of the installed QEMU without a guest: its processor is paused.
func realVM(t *testing.T, boot ...Disk) *VM {
	t.Helper()
	needsQEMU(t)
	cfg := Config{Dir: shortDir(t), GuestCID: 0x7f000000 + uint32(os.Getpid())<<4 + realVMs.Add(1), MemoryMiB: 64, BootDisks: boot}
	if !detectVsock("/").inKernel {
		var err error
		cfg.Directvol, err = builtDirectvol()
		must(t, err)
	}
	vm, err := Start(limited(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, vm) })
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to reproduce:\n%s", vm.Reproduce())
		}
	})
	must(t, vm.execute(limited(t), "stop", nil, nil))
	return vm
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// resetGuest makes QEMU complete the requests to its guest: a reset carries out pending unplugs.
func resetGuest(t *testing.T, vm *VM) {
	t.Helper()
	must(t, vm.execute(limited(t), "set-action", map[string]string{"reboot": "reset"}, nil))
	must(t, vm.execute(limited(t), "system_reset", nil, nil))
}

func TestRealQEMU(t *testing.T) {
	vm := realVM(t, Disk{ID: "root", Path: image(t, mib), ReadOnly: true, Serial: "root-disk"})
	if v := vm.Version(); !strings.Contains(v, ".") {
		t.Errorf("version %q", v)
	}
	must(t, vm.execute(limited(t), "set-action", map[string]string{"reboot": "reset"}, nil))
	must(t, vm.execute(limited(t), "cont", nil, nil)) // a paused machine keeps the stores of detached disks open
	path := image(t, 8*mib)
	t.Run("attach", func(t *testing.T) {
		a, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path, Serial: "serial"})
		must(t, err)
		if want := "02/01"; a.PCIPath != want {
			t.Errorf("PCI path:\nwant %s\ngot  %s", want, a.PCIPath)
		}
	})
	t.Run("attach is undone where device_add fails", func(t *testing.T) { attachIsUndone(t, vm) })
	t.Run("resize", func(t *testing.T) { resizeForReal(t, vm, path) })
	t.Run("fault under the raw node", func(t *testing.T) { faultForReal(t, vm) })
	t.Run("detach", func(t *testing.T) { detachForReal(t, vm) })
	t.Run("vsock backend dies", func(t *testing.T) {
		if vm.backend == nil {
			t.Skip("the host's kernel is the backend (run it where there is no /dev/vhost-vsock)")
		}
		must(t, vm.backend.kill(longEnough))
		<-vm.VsockDone()
		if _, err := vm.AttachDisk(limited(t), Disk{ID: "after", Path: image(t, mib)}); err != nil {
			t.Errorf("disks should go on without vsock: %v", err)
		}
	})
	must(t, vm.execute(limited(t), "quit", nil, nil))
	got, err := vm.AwaitShutdown(limited(t))
	if want := (Shutdown{Reason: "host-qmp-quit"}); err != nil || got != want {
		t.Errorf("shutdown:\nwant %+v\ngot  %+v, %v", want, got, err)
	}
}

// The filter applies to each thread (proc(5), Seccomp: 2), and prevents starting processes.
func TestRealQEMUIsConfined(t *testing.T) {
	vm := realVM(t)
	if !vm.Confined() {
		t.Skip("this QEMU was built without seccomp (run it with Debian's qemu-system-x86)")
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", vm.qemu.cmd.Process.Pid))
	must(t, err)
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		must(t, err)
		if !strings.Contains(string(status), "Seccomp:\t2\n") {
			t.Errorf("%s: want Seccomp: 2\ngot  %s", thread, status)
		}
	}
	if len(threads) < 2 {
		t.Errorf("QEMU's threads: want its main loop and a processor, got %v", threads)
	}
}

// attachIsUndone makes QEMU refuse a device by taking its slot.
func attachIsUndone(t *testing.T, vm *VM) {
	thief := &disk{Disk: Disk{ID: "thief", Path: image(t, mib)}, number: 1000, slot: slot{1, 2}}
	var err error
	thief.store, err = vm.cfg.Stores.Find(thief.Path)
	must(t, err)
	t.Cleanup(thief.store.Close)
	must(t, thief.store.Claim("thief", false))
	must(t, vm.plug(limited(t), thief, false))
	want, err := vm.state(limited(t))
	must(t, err)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "late", Path: image(t, mib)}); err == nil {
		t.Error("attached in a slot that is taken")
	}
	got, err := vm.state(limited(t))
	must(t, err)
	if !maps.Equal(got.nodes, want.nodes) {
		t.Errorf("block nodes:\nwant %v\ngot  %v", want.nodes, got.nodes)
	}
	if _, ok := vm.Disk("late"); ok {
		t.Error("the VM has a disk that it has not")
	}
}

func resizeForReal(t *testing.T, vm *VM, path string) {
	for _, test := range []struct {
		bytes uint64
		want  error
	}{{16 * mib, nil}, {16 * mib, nil}, {8 * mib, ErrShrink}, {16*mib - 512, ErrShrink}} {
		if err := vm.ResizeDisk(limited(t), "data", test.bytes); !errors.Is(err, test.want) {
			t.Errorf("to %d:\nwant %v\ngot  %v", test.bytes, test.want, err)
		}
		info, err := os.Stat(path)
		must(t, err)
		if info.Size() != 16*mib {
			t.Errorf("after a resize to %d, the image:\nwant %d bytes\ngot  %d", test.bytes, 16*mib, info.Size())
		}
	}
}

// faultForReal puts a node that fails every write under the disk, grows the disk nevertheless, and
// restores the node.
func faultForReal(t *testing.T, vm *VM) {
	must(t, vm.execute(limited(t), "blockdev-add", map[string]any{
		"driver": "blkdebug", "node-name": "bad", "image": FileNode("data"),
		"inject-error": []any{map[string]any{"event": "none", "iotype": "write", "errno": 5}},
	}, nil))
	must(t, vm.ReplaceFileNode(limited(t), "data", "bad"))
	if err := vm.ResizeDisk(limited(t), "data", 32*mib); err != nil {
		t.Errorf("under a fault: %v", err)
	}
	must(t, vm.ReplaceFileNode(limited(t), "data", FileNode("data")))
	must(t, vm.execute(limited(t), "blockdev-del", map[string]string{"node-name": "bad"}, nil))
	if err := vm.ResizeDisk(limited(t), "data", 48*mib); err != nil {
		t.Errorf("healed: %v", err)
	}
}

func detachForReal(t *testing.T, vm *VM) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := vm.DetachDisk(ctx, "data"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a guest that releases it\nwant %v\ngot  %v", context.DeadlineExceeded, err)
	}
	detached := make(chan error, 1)
	go func() { detached <- vm.DetachDisk(limited(t), "data") }()
	resetGuest(t, vm)
	if err := <-detached; err != nil {
		t.Error(err)
	}
	now, err := vm.state(limited(t))
	must(t, err)
	for _, name := range []string{FileNode("data"), RawNode("data")} {
		if now.nodes[name] {
			t.Errorf("block node %s is left", name)
		}
	}
}

// loopDevice makes a block device from an image.
func loopDevice(t *testing.T, path string) string {
	t.Helper()
	out, err := exec.Command("losetup", "--find", "--show", path).Output()
	if err != nil {
		t.Skipf("no loop device (run as root, where the kernel has loop): losetup: %v", err)
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "--detach", device).Run() })
	return device
}

func TestRealBlockDeviceGrowsOnlyAfterItsStore(t *testing.T) {
	path := image(t, 8*mib)
	device := loopDevice(t, path)
	vm := realVM(t)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "loop", Path: device}); err != nil {
		t.Fatal(err)
	}
	if err := vm.ResizeDisk(limited(t), "loop", 16*mib); err == nil {
		t.Error("a device grew beyond its end")
	}
	if err := vm.ResizeDisk(limited(t), "loop", 4*mib); !errors.Is(err, ErrShrink) {
		t.Errorf("a smaller size:\nwant %v\ngot  %v", ErrShrink, err)
	}
	must(t, os.Truncate(path, 16*mib))
	must(t, exec.Command("losetup", "--set-capacity", device).Run())
	if err := vm.ResizeDisk(limited(t), "loop", 16*mib); err != nil {
		t.Errorf("after its store: %v", err)
	}
}

func TestRealQEMUExplainsWhyItDidNotStart(t *testing.T) {
	needsQEMU(t)
	quiet := logrus.NewEntry(logrus.New())
	_, err := Start(limited(t), Config{Dir: shortDir(t), GuestCID: 3, Kernel: "/nonexistent/vmlinuz", Directvol: playedProgram(t), Log: quiet})
	if err == nil || !strings.Contains(err.Error(), "/nonexistent/vmlinuz") {
		t.Errorf("want the kernel's path, got %v", err)
	}
}

// playedProgram returns the program that plays the vsock backend.
func playedProgram(t *testing.T) string {
	t.Setenv(playBackend, "serves")
	return playedConfig("").Directvol
}
