package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/holders"
	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/host/trial"
	"github.com/directvol/directvol/host/trial/trialtest"
)

// opensOf returns how often a VM's QEMU has a path open.
func opensOf(t *testing.T, vm *VM, path string) int {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", vm.qemu.cmd.Process.Pid))
	must(t, err)
	opens := 0
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == path {
			opens++
		}
	}
	return opens
}

func TestStoreOfAVMIsRefusedToAnother(t *testing.T) {
	path, boot := image(t, mib), image(t, mib)
	device := loopDevice(t, path)
	first := realVM(t, Disk{ID: "boot", Path: boot})
	second := realVM(t)
	link := filepath.Join(t.TempDir(), "by-id")
	must(t, os.Symlink(device, link))
	_, err := first.AttachDisk(limited(t), Disk{ID: "data", Path: device})
	must(t, err)
	for _, name := range []string{path, device, link, boot} {
		for _, readOnly := range []bool{false, true} {
			_, err := second.AttachDisk(limited(t), Disk{ID: "data", Path: name, ReadOnly: readOnly})
			if inUse, ok := errors.AsType[*holders.InUseError](err); !ok || !strings.Contains(inUse.Error(), "for the VM in "+first.cfg.Dir) {
				t.Errorf("%s, read-only %v:\nwant it in use by the VM in %s\ngot  %v", name, readOnly, first.cfg.Dir, err)
			}
		}
	}
	must(t, first.Kill(limited(t)))
	for i, name := range []string{device, boot} {
		if _, err := second.AttachDisk(limited(t), Disk{ID: fmt.Sprintf("d%d", i), Path: name}); err != nil {
			t.Errorf("after the first VM's end: %v", err)
		}
	}
}

// The path is resolved once: a store that was moved still belongs to the disk, and a new file under
// its path does not.
func TestDiskKeepsItsStoreWhenTheNameChanges(t *testing.T) {
	vm := realVM(t)
	path := image(t, mib)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path})
	must(t, err)
	moved := path + ".moved"
	must(t, os.Rename(path, moved))
	must(t, os.WriteFile(path, make([]byte, 8*mib), 0o600)) // larger than the requested size
	must(t, vm.ResizeDisk(limited(t), "data", 2*mib))
	for name, want := range map[string]int64{path: 8 * mib, moved: 2 * mib} {
		info, err := os.Stat(name)
		must(t, err)
		if info.Size() != want {
			t.Errorf("%s:\nwant %d bytes\ngot  %d", name, want, info.Size())
		}
	}
}

// QEMU locks an image that it got by descriptor like an image that it opened itself.
func TestStoreByDescriptorHasQEMUsLocks(t *testing.T) {
	vm := realVM(t)
	path := image(t, mib)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path})
	must(t, err)
	other, err := os.Open(path)
	must(t, err)
	defer other.Close()
	if holder, err := holders.Locked(other); err != nil || holder == nil || !strings.Contains(holder.How, "QEMU's image lock") {
		t.Errorf("locks of an attached image:\nwant QEMU's\ngot  %v, %v", holder, err)
	}
}

// A paused QEMU keeps the store of a disk that has left: a detach that answered OK would leave a
// block device in use until the VM ends.
func TestDetachFromAPausedMachineLeavesNoStoreOpen(t *testing.T) {
	vm := realVM(t)
	path := image(t, mib)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path})
	must(t, err)
	must(t, vm.execute(limited(t), "set-action", map[string]string{"reboot": "reset"}, nil))
	err = detachBesideResets(t, vm, "data")
	if opens := opensOf(t, vm, path); err == nil && opens > 0 {
		t.Errorf("the detach succeeded, and the paused QEMU has the store open %d times", opens)
	}
	if _, there := vm.Disk("data"); err != nil && (!there || !strings.Contains(err.Error(), "when the machine runs")) {
		t.Errorf("\nwant the disk kept, and an error that says why\ngot  %v, and the disk %v", err, there)
	}
	must(t, vm.execute(limited(t), "cont", nil, nil))
	must(t, vm.DetachDisk(limited(t), "data"))
	if opens := opensOf(t, vm, path); opens != 0 {
		t.Errorf("after the pause QEMU has the store open %d times", opens)
	}
}

// An attach that fails on a paused machine cannot be undone before the machine runs. Until then the
// disk is half attached; the next attach resumes it, and the disk is as good as any other.
func TestAttachThatFailedOnAPausedMachineIsResumed(t *testing.T) {
	vm := realVM(t)
	path := image(t, mib)
	want := Disk{ID: "data", Path: path}
	refused := want
	refused.Serial = strings.Repeat("x", maxSerial)
	must(t, vm.qmp.Execute(limited(t), "device_add", map[string]string{"driver": "virtio-rng-pci", "id": "taken", "bus": "b1", "addr": "1"}, nil))
	_, err := vm.AttachDisk(limited(t), want)
	if err == nil || !strings.Contains(err.Error(), "detach the disk to finish that") || !strings.Contains(err.Error(), "when the machine runs") {
		t.Errorf("attach to a slot that is taken\nwant an error that says how it is undone\ngot  %v", err)
	}
	if _, err := vm.AttachDisk(limited(t), refused); !errors.Is(err, ErrAttached) {
		t.Errorf("another disk with its id\nwant %v\ngot  %v", ErrAttached, err)
	}
	if err := vm.ResizeDisk(limited(t), "data", 2*mib); err == nil {
		t.Error("a disk that is half attached was resized")
	}
	if _, err := vm.AttachDisk(limited(t), want); err == nil {
		t.Error("the attach succeeded, although its slot is taken")
	}
	unplugOther(t, vm, "taken")
	_, err = vm.AttachDisk(limited(t), want) // resumed, while the machine is paused
	must(t, err)
	must(t, vm.execute(limited(t), "cont", nil, nil))
	vm.qmp.Close() // QEMU drops what no node uses
	vm.qmp, err = qmp.Dial(limited(t), vm.path(monitorSocket), vm.settle)
	must(t, err)
	go vm.watchDisks(vm.qmp.Subscribe(diskEvents...))
	must(t, vm.ResizeDisk(limited(t), "data", 2*mib))
	must(t, detachBesideResets(t, vm, "data"))
	if opens := opensOf(t, vm, path); opens != 0 {
		t.Errorf("QEMU has the store open %d times", opens)
	}
}

// detachBesideResets detaches a disk from a machine without a guest, whose resets carry out the
// unplug. A reset must not power the machine off (set-action).
func detachBesideResets(t *testing.T, vm *VM, id string) error {
	t.Helper()
	stop, reset := make(chan struct{}), make(chan struct{})
	go func() { defer close(reset); resetUntil(vm, stop) }()
	err := vm.DetachDisk(limited(t), id)
	close(stop)
	<-reset
	return err
}

// unplugOther removes a device that is none of the VM's disks.
func unplugOther(t *testing.T, vm *VM, device string) {
	t.Helper()
	deleted := vm.qmp.Subscribe("DEVICE_DELETED")
	must(t, vm.execute(limited(t), "device_del", map[string]string{"id": device}, nil))
	resetGuest(t, vm)
	for e := range deleted.Events() {
		if strings.Contains(string(e.Data), `"`+device+`"`) {
			return
		}
	}
	t.Fatalf("the connection ended before %s was gone", device)
}

func TestStoreThatStaysOpenIsExplained(t *testing.T) {
	for run, want := range map[string]string{
		"running": "detach the disk again", "paused": "when the machine runs", "io-error": "when the machine runs",
		"guest-panicked": "kill the machine", "internal-error": "kill the machine", "shutdown": "kill the machine",
	} {
		if got := keptOpen(run).Error(); !strings.Contains(got, want) || run == "running" && strings.Contains(got, "when") {
			t.Errorf("%s\nwant %q\ngot  %q", run, want, got)
		}
	}
}

func TestDetachedStoreIsOpenNowhere(t *testing.T) {
	vm := realVM(t)
	must(t, vm.execute(limited(t), "set-action", map[string]string{"reboot": "reset"}, nil))
	must(t, vm.execute(limited(t), "cont", nil, nil))
	path := image(t, mib)
	for range 3 {
		_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path})
		must(t, err)
		if opensOf(t, vm, path) == 0 {
			t.Error("QEMU has the store of a disk open nowhere")
		}
		must(t, detachBesideResets(t, vm, "data"))
		if opens := opensOf(t, vm, path); opens != 0 {
			t.Errorf("QEMU has the store of a detached disk open %d times", opens)
		}
		store, err := vm.cfg.Stores.Find(path)
		must(t, err)
		must(t, store.Claim("another sandbox", false))
		store.Close()
	}
}

func TestErrorsMapToThoseOfTheSandbox(t *testing.T) {
	for err, want := range map[error]error{
		fmt.Errorf("attach: %w", &holders.InUseError{Disk: "/store"}): sandbox.ErrBusy,
		fmt.Errorf("qmp device_add: %w", qmp.ErrOutcomeUnknown):       sandbox.ErrOutcomeUnknown,
		fmt.Errorf("resize disk data: %w", ErrCutOff):                 sandbox.ErrInfeasible,
	} {
		if got := typed(err); !errors.Is(got, want) || got.Error() != err.Error() {
			t.Errorf("%v:\nwant %v, said as before\ngot  %v", err, want, got)
		}
	}
}

// An error may mean more than one thing: a disk hangs while the guest keeps another one, and this
// one was not asked for.
func TestErrorMatchesEveryKindItWraps(t *testing.T) {
	err := typed(fmt.Errorf("detach: %w", notAsked{fmt.Errorf("%w: %w", ErrHotplugHeld, &HangsError{ID: "dead"})}))
	for _, want := range []error{sandbox.ErrHotplugHeld, sandbox.ErrStoreHangs, sandbox.ErrNotAsked, ErrDiskHangs} {
		if !errors.Is(err, want) {
			t.Errorf("want %v\ngot  %v", want, err)
		}
	}
	if errors.Is(err, sandbox.ErrKept) {
		t.Errorf("it is %v", sandbox.ErrKept)
	}
}

func TestFailedStartLeavesItsBootDisksToOthers(t *testing.T) {
	path, stores := image(t, mib), testStores(t)
	if _, err := startPlayed(t, "dies", "serves", func(c *Config) { c.Stores, c.BootDisks = stores, []Disk{{ID: "boot", Path: path}} }); err == nil {
		t.Fatal("it started")
	}
	store, err := stores.Find(path)
	must(t, err)
	defer store.Close()
	must(t, store.Claim("another sandbox", false))
}

// A boot disk is passed by descriptor too, but the command line for starting the VM by hand has its
// path.
func TestBootDiskIsPassedByDescriptor(t *testing.T) {
	path := image(t, mib)
	vm := realVM(t, Disk{ID: "boot", Path: path})
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", vm.qemu.cmd.Process.Pid))
	must(t, err)
	if text := string(line); strings.Contains(text, path) || !strings.Contains(text, "/dev/fdset/1") {
		t.Errorf("QEMU's command line:\nwant /dev/fdset/1\ngot  %q", text)
	}
	if !strings.Contains(vm.Reproduce(), path) {
		t.Errorf("by hand:\nwant %s\ngot  %s", path, vm.Reproduce())
	}
	if opensOf(t, vm, path) == 0 {
		t.Error("QEMU has the store of its boot disk open nowhere")
	}
}

// A store's path may lead elsewhere by now: a link was changed, or a mount was removed (umount -l).
func TestStoreThatIsTriedIsTheOneThatQEMUHas(t *testing.T) {
	must(t, trial.Prepare(limited(t))) // beside a store that hangs it could not start
	hung, stop, answer := trialtest.Serve(t)
	vm, _ := fakeVM(t)
	vm.try = vm.tryStore
	fine, link := image(t, mib), filepath.Join(t.TempDir(), "link")
	for _, way := range []struct {
		id, now, then string
		answers       bool
	}{{"hangs", hung, fine, false}, {"answers", fine, hung, true}} {
		must(t, os.Symlink(way.now, link))
		_, err := vm.AttachDisk(limited(t), Disk{ID: way.id, Path: link})
		must(t, err)
		must(t, os.Remove(link))
		must(t, os.Symlink(way.then, link))
		stop()
		ctx, cancel := limited(t), func() {}
		if !way.answers {
			ctx, cancel = context.WithTimeout(ctx, time.Second)
		}
		err = Machine{vm}.Answers(ctx, way.id)
		cancel()
		if way.answers != (err == nil) {
			t.Errorf("the disk's store %s: %v", way.id, err)
		}
		answer()
		must(t, os.Remove(link))
	}
	must(t, unix.Unmount(hung, unix.MNT_DETACH))
	must(t, Machine{vm}.Answers(limited(t), "hangs"))
	stop()
	defer answer()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := (Machine{vm}).Answers(ctx, "hangs"); err == nil {
		t.Error("a store that hangs answers, when its mount was taken away")
	}
}

// playHidden makes the test binary run one test as a program whose descriptors are hidden.
const playHidden = "DIRECTVOL_TEST_HIDDEN"

// Nobody may look at the descriptors of a program with capabilities in its file: it is not dumpable
// (prctl(2)). The process that tries the stores is somebody else then.
func TestStoreOfAProgramWhoseDescriptorsAreHiddenIsTriedByItsPath(t *testing.T) {
	if os.Getenv(playHidden) == "" {
		runHidden(t)
		return
	}
	must(t, unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0))
	must(t, trial.Prepare(limited(t)))
	hung, stop, answer := trialtest.Serve(t)
	vm, _ := fakeVM(t)
	log, hook := test.NewNullLogger()
	vm.log, vm.try = logrus.NewEntry(log), vm.tryStore
	fine := image(t, mib)
	for id, path := range map[string]string{"hangs": hung, "fine": fine, "moved": image(t, mib)} {
		_, err := vm.AttachDisk(limited(t), Disk{ID: id, Path: path})
		must(t, err)
	}
	must(t, os.Remove(vm.disks.find("moved").Path))
	stop()
	defer answer()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := (Machine{vm}).Answers(ctx, "hangs"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a store that hangs\nwant %v\ngot  %v", context.DeadlineExceeded, err)
	}
	for _, id := range []string{"fine", "moved"} {
		if err := (Machine{vm}).Answers(limited(t), id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if said := hook.AllEntries(); len(said) != 1 || !strings.Contains(said[0].Message, "by their paths") {
		t.Errorf("want one warning\ngot  %v", said)
	}
}

// runHidden runs the calling test again in a process of its own. Root may look at everything,
// unless it lacks a capability.
func runHidden(t *testing.T) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), playHidden+"=1")
	type result struct {
		said []byte
		err  error
	}
	ran := make(chan result)
	go func() {
		runtime.LockOSThread()                                             // and never unlock: the thread ends with the goroutine
		_ = unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_PTRACE, 0, 0, 0) // fails if the test is not root
		said, err := cmd.CombinedOutput()
		ran <- result{said, err}
	}()
	r := <-ran
	switch {
	case r.err != nil:
		t.Errorf("%v\n%s", r.err, r.said)
	case strings.Contains(string(r.said), "--- SKIP"):
		t.Skipf("%s", r.said)
	case !strings.Contains(string(r.said), "--- PASS"):
		t.Errorf("it has not run:\n%s", r.said)
	}
}
