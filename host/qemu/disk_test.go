package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/sandbox"
)

const mib = 1 << 20

func TestAttachNeedsTwoNodesAndADevice(t *testing.T) {
	vm, q := fakeVM(t)
	a, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib), Serial: "s1"})
	if err != nil {
		t.Fatal(err)
	}
	if want := "02/01"; a.PCIPath != want {
		t.Errorf("PCI path:\nwant %s\ngot  %s", want, a.PCIPath)
	}
	want := []string{"qmp_capabilities", "add-fd", "blockdev-add", "blockdev-add", "device_add"}
	q.with(func() {
		if !slices.Equal(q.commands, want) {
			t.Errorf("commands:\nwant %v\ngot  %v", want, q.commands)
		}
	})
	if got, ok := vm.Disk("data"); !ok || got != a {
		t.Errorf("Disk:\nwant %v\ngot  %v, %v", a, got, ok)
	}
}

func TestAttachUnwindsEachStep(t *testing.T) {
	for failing := 1; failing <= 3; failing++ {
		t.Run(fmt.Sprintf("step %d", failing), func(t *testing.T) {
			vm, q := fakeVM(t)
			step := 0
			q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
				if command == "blockdev-add" || command == "device_add" {
					step++
				}
				return nil, &qmp.Error{Class: "GenericError", Desc: "no"}, step == failing && strings.HasSuffix(command, "add")
			})
			path := image(t, mib)
			if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path}); err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("want an error with the path, got %v", err)
			}
			q.with(func() {
				if len(q.nodes) != 0 || len(q.devices) != 0 {
					t.Errorf("left behind: nodes %v, devices %v", q.nodes, q.devices)
				}
				q.hook = nil
			})
			if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path}); err != nil {
				t.Errorf("a second try: %v", err)
			}
		})
	}
}

// QEMU may carry out a device_add whose caller has given up. The VM must then still know the disk.
func TestAttachThatCannotBeUndoneIsLeftToDetach(t *testing.T) {
	vm, q := fakeVM(t)
	q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command == "device_add" {
			device := deviceOf(vm, "data")
			q.devices[device], q.drives[device] = true, RawNode("data")
			return nil, &qmp.Error{Class: "GenericError", Desc: "no"}, true
		}
		return nil, nil, false
	})
	d := Disk{ID: "data", Path: image(t, mib)}
	if _, err := vm.AttachDisk(limited(t), d); err == nil || !strings.Contains(err.Error(), "detach the disk") {
		t.Errorf("want an error that says what to do, got %v", err)
	}
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)}); !errors.Is(err, ErrAttached) {
		t.Errorf("attached over the half of another:\nwant %v\ngot  %v", ErrAttached, err)
	}
	if err := vm.DetachDisk(limited(t), "data"); err != nil {
		t.Error(err)
	}
	q.with(func() {
		if len(q.nodes) != 0 || len(q.devices) != 0 || len(q.sets) != 0 {
			t.Errorf("left behind: nodes %v, devices %v, sets %v", q.nodes, q.devices, q.sets)
		}
	})
}

func TestOneStoreIsOneDisk(t *testing.T) {
	vm, _ := fakeVM(t)
	path := image(t, mib)
	link, hard := filepath.Join(t.TempDir(), "link"), path+".hard"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(path, hard); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "a", Path: path}); err != nil {
		t.Fatal(err)
	}
	for _, d := range []Disk{
		{ID: "a", Path: image(t, mib)}, {ID: "b", Path: path}, {ID: "b", Path: link}, {ID: "b", Path: hard}, {ID: "b", Path: path, ReadOnly: true},
	} {
		if _, err := vm.AttachDisk(limited(t), d); !errors.Is(err, ErrAttached) {
			t.Errorf("%+v:\nwant %v\ngot  %v", d, ErrAttached, err)
		}
	}
	shared := image(t, mib)
	for _, id := range []string{"r1", "r2"} {
		if _, err := vm.AttachDisk(limited(t), Disk{ID: id, Path: shared, ReadOnly: true}); err != nil {
			t.Errorf("read-only %s: %v", id, err)
		}
	}
}

func TestAttachRefusesAFileThatIsNotADisk(t *testing.T) {
	vm, q := fakeVM(t)
	for _, d := range []Disk{
		{ID: "", Path: image(t, mib)}, {ID: "a,b", Path: image(t, mib)}, {ID: strings.Repeat("x", 26), Path: image(t, mib)},
		{ID: "a", Path: "/nonexistent"}, {ID: "a", Path: "/dev/null"}, {ID: "a", Path: t.TempDir()},
		{ID: "a", Path: image(t, mib), Serial: strings.Repeat("s", 21)},
	} {
		if _, err := vm.AttachDisk(limited(t), d); err == nil {
			t.Errorf("%+v: attached", d)
		}
	}
	q.with(func() {
		if len(q.commands) != 1 {
			t.Errorf("QEMU was asked: %v", q.commands)
		}
	})
}

func TestResizeNeverShrinks(t *testing.T) {
	vm, q := fakeVM(t)
	path := image(t, 4*mib)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path}); err != nil {
		t.Fatal(err)
	}
	if err := vm.ResizeDisk(limited(t), "data", 4*mib-512); !errors.Is(err, ErrShrink) {
		t.Errorf("a smaller size:\nwant %v\ngot  %v", ErrShrink, err)
	}
	// The file is grown behind QEMU's back, so it is larger than QEMU knows.
	if err := os.Truncate(path, 8*mib); err != nil {
		t.Fatal(err)
	}
	if err := vm.ResizeDisk(limited(t), "data", 6*mib); !errors.Is(err, ErrShrink) {
		t.Errorf("a size smaller than the file's:\nwant %v\ngot  %v", ErrShrink, err)
	}
	if err := vm.ResizeDisk(limited(t), "data", 4*mib); err != nil {
		t.Errorf("the present size: %v", err)
	}
	q.with(func() {
		if slices.Contains(q.commands, "block_resize") {
			t.Errorf("QEMU was asked: %v", q.commands)
		}
	})
	if err := vm.ResizeDisk(limited(t), "data", 16*mib); err != nil {
		t.Errorf("a larger size: %v", err)
	}
}

// Somebody has cut the file off behind QEMU's back. The guest reads zeroes there, and no size makes
// that good: neither the present one nor a larger one, which would only hide the loss.
func TestDiskWhoseStoreWasCutOffIsNotResized(t *testing.T) {
	vm, q := fakeVM(t)
	path := image(t, 4*mib)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: path}); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 2*mib); err != nil {
		t.Fatal(err)
	}
	for _, bytes := range []uint64{4 * mib, 8 * mib} {
		err := vm.ResizeDisk(limited(t), "data", bytes)
		if !errors.Is(err, ErrCutOff) || !strings.Contains(err.Error(), "2097152") || !strings.Contains(err.Error(), "4194304") {
			t.Errorf("to %d bytes:\nwant %v, with both sizes\ngot  %v", bytes, ErrCutOff, err)
		}
	}
	q.with(func() {
		if slices.Contains(q.commands, "block_resize") {
			t.Errorf("QEMU was asked: %v", q.commands)
		}
	})
	if err := os.Truncate(path, 4*mib); err != nil {
		t.Fatal(err)
	}
	if err := vm.ResizeDisk(limited(t), "data", 8*mib); err != nil {
		t.Errorf("with its size again: %v", err)
	}
}

func TestResizeDoesNotTrustOK(t *testing.T) {
	vm, q := fakeVM(t)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)}); err != nil {
		t.Fatal(err)
	}
	q.with(func() {
		q.hook = func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
			return struct{}{}, nil, command == "block_resize" // host_device behaves like this
		}
	})
	err := vm.ResizeDisk(limited(t), "data", 2*mib)
	if err == nil || !strings.Contains(err.Error(), "1048576 bytes, not 2097152") {
		t.Errorf("want an error with both sizes, got %v", err)
	}
}

func TestResizeRefusals(t *testing.T) {
	vm, _ := fakeVM(t)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "ro", Path: image(t, mib), ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		id    string
		bytes uint64
		want  string
	}{{"ro", 2 * mib, "read-only"}, {"ro", mib + 1, "multiple of 512"}, {"ro", 1 << 63, "at most"}, {"none", mib, "no such disk"}} {
		if err := vm.ResizeDisk(limited(t), test.id, test.bytes); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s to %d:\nwant %s\ngot  %v", test.id, test.bytes, test.want, err)
		}
	}
}

func TestDetachRemovesAllAndMayBeRepeated(t *testing.T) {
	vm, q := fakeVM(t)
	d := Disk{ID: "data", Path: image(t, mib)}
	first, err := vm.AttachDisk(limited(t), d)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := vm.DetachDisk(limited(t), "data"); err != nil {
			t.Error(err)
		}
	}
	q.with(func() {
		if len(q.nodes) != 0 || len(q.devices) != 0 || len(q.sets) != 0 {
			t.Errorf("left behind: nodes %v, devices %v, sets %v", q.nodes, q.devices, q.sets)
		}
	})
	select {
	case <-first.Gone:
	default:
		t.Error("the disk is gone, but no message says so")
	}
	again, err := vm.AttachDisk(limited(t), d)
	if err != nil {
		t.Fatal(err)
	}
	if again.PCIPath == first.PCIPath {
		t.Errorf("attached again: the slot %s is used again at once, with others free", again.PCIPath)
	}
	select {
	case <-again.Gone:
		t.Error("a disk that was attached anew is gone with the one before it")
	default:
	}
}

func TestRepeatedDetachContinuesWhereItStopped(t *testing.T) {
	vm, q := fakeVM(t)
	d := Disk{ID: "data", Path: image(t, mib)}
	if _, err := vm.AttachDisk(limited(t), d); err != nil {
		t.Fatal(err)
	}
	givenUpDetach(t, vm, q, "data")
	if _, err := vm.AttachDisk(limited(t), d); !errors.Is(err, ErrAttached) {
		t.Errorf("attached while it leaves:\nwant %v\ngot  %v", ErrAttached, err)
	}
	// The guest releases the disk while no call waits, and a node stays in use.
	q.with(func() {
		q.letGo(deviceOf(vm, "data"))
		q.hook = refusing(-1)
	})
	late, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer stop()
	if err := vm.DetachDisk(late, "data"); err == nil {
		t.Error("detached, though its file node stayed")
	}
	q.answerBy(nil)
	if err := vm.DetachDisk(limited(t), "data"); err != nil {
		t.Error(err)
	}
	q.with(func() {
		if len(q.nodes) != 0 {
			t.Errorf("nodes left behind: %v", q.nodes)
		}
	})
}

// refusing returns a hook that refuses to remove the disk's file node the given number of times; -1
// means always.
func refusing(times int) func(string, json.RawMessage) (any, *qmp.Error, bool) {
	return func(command string, arguments json.RawMessage) (any, *qmp.Error, bool) {
		if times == 0 || command != "blockdev-del" || !strings.Contains(string(arguments), FileNode("data")) {
			return nil, nil, false
		}
		times--
		return nil, &qmp.Error{Class: "GenericError", Desc: "Node file-data is in use"}, true
	}
}

// QEMU reports a device as gone a moment before it releases the device's node.
func TestNodeThatIsFreedAMomentLaterIsRemoved(t *testing.T) {
	vm, q := fakeVM(t)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)}); err != nil {
		t.Fatal(err)
	}
	q.answerBy(refusing(3))
	if err := vm.DetachDisk(limited(t), "data"); err != nil {
		t.Error(err)
	}
}

func TestDetachReportsThatTheGuestRefuses(t *testing.T) {
	vm, q := fakeVM(t)
	q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command == "device_del" {
			go q.refuseAfterAnswer(vm, "data")
		}
		return struct{}{}, nil, command == "device_del"
	})
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)}); err != nil {
		t.Fatal(err)
	}
	if err := vm.DetachDisk(limited(t), "data"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("want a refusal, got %v", err)
	}
}

func TestReplaceFileNodeKeepsTheOtherOptions(t *testing.T) {
	vm, q := fakeVM(t)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)}); err != nil {
		t.Fatal(err)
	}
	var got string
	q.with(func() {
		q.hook = func(command string, arguments json.RawMessage) (any, *qmp.Error, bool) {
			if command == "blockdev-reopen" {
				got = string(arguments)
			}
			return nil, nil, false
		}
	})
	if err := vm.ReplaceFileNode(limited(t), "data", "bad"); err != nil {
		t.Fatal(err)
	}
	want := `{"options":[{"driver":"raw","node-name":"drive-data","file":"bad","read-only":false,"discard":"unmap"}]}`
	q.with(func() {
		if got != want {
			t.Errorf("arguments:\nwant %s\ngot  %s", want, got)
		}
	})
}

func TestBootDisksStay(t *testing.T) {
	vm, _ := fakeVM(t)
	if err := vm.disks.addBoot(limited(t), 0, Disk{ID: "root", Path: image(t, mib)}); err != nil {
		t.Fatal(err)
	}
	if a, _ := vm.Disk("root"); a.PCIPath != "11" {
		t.Errorf("PCI path:\nwant 11\ngot  %s", a.PCIPath)
	}
	if err := vm.DetachDisk(limited(t), "root"); err == nil || !strings.Contains(err.Error(), "boot disk") {
		t.Errorf("want a refusal, got %v", err)
	}
}

func TestSlotsAreReusedAndRunOut(t *testing.T) {
	taken := make(map[slot]bool)
	for i := range 2 * disksPerBridge {
		s, err := freeSlot(2, taken, nil)
		if err != nil {
			t.Fatalf("disk %d: %v", i, err)
		}
		taken[s] = true
	}
	if _, err := freeSlot(2, taken, nil); err == nil || !strings.Contains(err.Error(), "all 60") {
		t.Errorf("want an error, got %v", err)
	}
	back := slot{2, 0x1e}
	delete(taken, back)
	if s, err := freeSlot(2, taken, nil); err != nil || s != back {
		t.Errorf("slot:\nwant %v\ngot  %v, %v", back, s, err)
	}
	longer, shorter := slot{1, 7}, slot{1, 3}
	delete(taken, longer)
	delete(taken, shorter)
	if s, err := freeSlot(2, taken, map[slot]uint64{longer: 1, shorter: 2, back: 3}); err != nil || s != longer {
		t.Errorf("slot, of three that were freed:\nwant %v\ngot  %v, %v", longer, s, err)
	}
	if want, got := "03/1e", back.path().String(); got != want {
		t.Errorf("PCI path:\nwant %s\ngot  %s", want, got)
	}
}

// TestStoreThatSomebodyElseGrowsMeanwhileIsResizedAgain: the store's size is then not the size that
// QEMU was given.
func TestStoreThatSomebodyElseGrowsMeanwhileIsResizedAgain(t *testing.T) {
	vm, q := fakeVM(t)
	path := image(t, mib)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "d", Path: path})
	must(t, err)
	asked := 0
	q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command != "block_resize" {
			return nil, nil, false
		}
		asked++
		return struct{}{}, nil, os.Truncate(path, 3*mib) == nil // QEMU has made it 2 MiB before
	})
	if err := vm.ResizeDisk(limited(t), "d", 2*mib); err == nil {
		t.Error("a disk of another size: want an error")
	}
	must(t, vm.ResizeDisk(limited(t), "d", 3*mib))
	q.with(func() {
		if asked != 2 {
			t.Errorf("block_resize was sent\nwant 2 times\ngot  %d", asked)
		}
	})
	end(vm)
}

// Every call except a detach must fail for a missing disk, with this package's error and the
// sandbox's. A detach succeeds.
func TestMissingDiskIsErrNoDisk(t *testing.T) {
	vm, _ := fakeVM(t)
	for name, err := range map[string]error{
		"resize": vm.ResizeDisk(limited(t), "none", mib), "replace": vm.ReplaceFileNode(limited(t), "none", "bad"),
	} {
		if !errors.Is(err, ErrNoDisk) || !errors.Is(typed(err), sandbox.ErrNotFound) || !strings.Contains(err.Error(), "none") {
			t.Errorf("%s\nwant %v, and the disk named\ngot  %v", name, ErrNoDisk, err)
		}
	}
	must(t, vm.DetachDisk(limited(t), "none"))
}
