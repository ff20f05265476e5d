package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/registry"
	"github.com/directvol/directvol/host/sandbox"
)

// free fails the test if a store has an owner.
func free(t *testing.T, stores *registry.Stores, path string) {
	t.Helper()
	store, err := stores.Find(path)
	must(t, err)
	defer store.Close()
	if err := store.Claim("the next VM", false); err != nil {
		t.Errorf("%s is free\nwant nil\ngot  %v", path, err)
	}
}

// end marks a VM's QEMU as ended and releases the stores, in supervise's order.
func end(vm *VM) {
	vm.qmp.Close()
	close(vm.qemu.done)
	vm.releaseStores()
	vm.disks.allGone()
}

func TestStoreIsFreeForAnyoneAfterTheVMsEnd(t *testing.T) {
	vm, _ := fakeVM(t)
	before, after := image(t, mib), image(t, mib)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "before", Path: before})
	must(t, err)
	end(vm)
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "after", Path: after}); !errors.Is(err, ErrEnded) {
		t.Errorf("an attach after the end\nwant %v\ngot  %v", ErrEnded, err)
	}
	free(t, vm.disks.stores, before)
	free(t, vm.disks.stores, after)
}

// QEMU ends at a random moment of an attach.
func TestStoreIsFreeAfterAnEndBesideItsAttach(t *testing.T) {
	for range 30 {
		table := newDiskTable(2, testStores(t), "the test")
		path := image(t, mib)
		var both sync.WaitGroup
		both.Go(func() {
			if _, err := table.reserve(Disk{ID: "data", Path: path}); err != nil && !errors.Is(err, ErrEnded) {
				t.Error(err)
			}
		})
		both.Go(func() { table.end(ErrEnded, longEnough) })
		both.Wait()
		free(t, table.stores, path)
	}
}

func TestDisksAreGoneWhenTheVMHasEnded(t *testing.T) {
	vm, q := fakeVM(t)
	var gone []<-chan struct{}
	for _, id := range []string{"a", "b"} {
		a, err := vm.AttachDisk(limited(t), Disk{ID: id, Path: image(t, mib)})
		must(t, err)
		gone = append(gone, a.Gone)
	}
	givenUpDetach(t, vm, q, "a")
	waited := make(chan error)
	go func() { waited <- vm.DetachDisk(limited(t), "b") }() // waits for the disk that does not leave
	end(vm)
	for _, g := range gone {
		select {
		case <-g:
		case <-limited(t).Done():
			t.Fatal("the VM has ended, and a disk is not gone")
		}
	}
	if err := <-waited; !errors.Is(err, ErrEnded) {
		t.Errorf("a detach that waits for another disk\nwant %v\ngot  %v", ErrEnded, err)
	}
}

// deadDevice returns a loop device. die freezes the filesystem of its file and leaves data for it
// in the kernel's cache: then the device cannot be closed until thaw. No process may be started
// between the two: it would hang in the device's close if it is the last to close it.
func deadDevice(t *testing.T) (device string, die func(store *os.File), thaw func()) {
	t.Helper()
	path, freeze, thaw := frozen(t)
	must(t, os.Truncate(path, 16*mib))
	device = loopDevice(t, path)
	t.Cleanup(thaw)
	die = func(store *os.File) {
		freeze()
		// Last, because a sync(2) of any process would write earlier data to the device.
		if _, err := store.WriteAt(make([]byte, mib), 0); err != nil {
			t.Error(err)
		}
	}
	return device, die, thaw
}

// whenItCloses calls do when a disk's store has begun to close.
func whenItCloses(d *disk, do func()) {
	closes := d.close
	d.close = func() <-chan struct{} {
		defer do()
		return closes()
	}
}

// When the last user closes a device, the kernel writes QEMU's cached data to the disk.
func TestStoreThatDoesNotCloseDelaysNoOther(t *testing.T) {
	device, die, thaw := deadDevice(t)
	vm, q := fakeVM(t)
	other := image(t, mib)
	for id, path := range map[string]string{"dead": device, "other": other} {
		_, err := vm.AttachDisk(limited(t), Disk{ID: id, Path: path})
		must(t, err)
	}
	dead := vm.disks.find("dead")
	die(dead.store.File())
	q.with(func() {
		for _, f := range q.sets {
			f.Close()
		}
	})
	said := &lockedBuffer{}
	vm.log.Logger.SetOutput(said)
	ended := make(chan struct{})
	go func() { end(vm); close(ended) }()
	<-ended // returns although the device still hangs
	if _, ok := vm.Disk("dead"); !ok {
		t.Error("the table of disks cannot be asked")
	}
	free(t, vm.disks.stores, other)
	if !strings.Contains(said.text.String(), "the store of disk dead ("+device+")") {
		t.Errorf("the log\nwant the store that is left\ngot  %s", said.text.String())
	}
	thaw()
	<-dead.close()
	free(t, vm.disks.stores, device)
}

// A detach closes the store too: it must give up in time, and the VM must not forget the disk.
func TestDetachOfAStoreThatDoesNotCloseEndsInTime(t *testing.T) {
	device, die, thaw := deadDevice(t)
	vm, _ := fakeVM(t)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "dead", Path: device})
	must(t, err)
	dead := vm.disks.find("dead")
	die(dead.store.File())
	ctx, giveUp := context.WithCancel(limited(t))
	whenItCloses(dead, giveUp)
	answer := make(chan error, 1)
	go func() { answer <- vm.DetachDisk(ctx, "dead") }()
	select {
	case err = <-answer:
	case <-limited(t).Done():
		t.Fatal("a detach does not end, whatever its context")
	}
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "store has not closed") {
		t.Errorf("want %v, and the store\ngot  %v", context.Canceled, err)
	}
	if _, ok := vm.Disk("dead"); !ok {
		t.Error("the disk is forgotten, and its store is not free")
	}
	thaw()
	must(t, vm.DetachDisk(limited(t), "dead"))
	free(t, vm.disks.stores, device)
}

// Opening may hang as well: an attach must give up in time, and the store must become free when it
// has opened at last.
func TestAttachOfAStoreThatDoesNotOpenEndsInTime(t *testing.T) {
	vm, _ := fakeVM(t)
	opens := make(chan struct{})
	vm.disks.claim = func(s *registry.Store, owner string, readOnly bool) error {
		<-opens
		return s.Claim(owner, readOnly)
	}
	d := Disk{ID: "data", Path: image(t, mib)}
	answer := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := vm.AttachDisk(ctx, d)
		answer <- err
	}()
	select {
	case err := <-answer:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("want %v\ngot  %v", context.DeadlineExceeded, err)
		}
	case <-limited(t).Done():
		t.Error("an attach does not end, whatever its context")
	}
	close(opens)
	_, err := vm.AttachDisk(limited(t), d)
	must(t, err)
	must(t, vm.DetachDisk(limited(t), "data"))
	free(t, vm.disks.stores, d.Path)
}

// While nobody reads the events, more arrive than a subscriber's buffer holds; the last one reports
// that a disk has left.
func TestDiskThatLeavesAmongTooManyEventsIsKnownToHave(t *testing.T) {
	vm, q := fakeVM(t)
	a, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)})
	must(t, err)
	device := deviceOf(vm, "data")
	vm.disks.mu.Lock() // blocks the reader of the events
	q.with(func() {
		for range 200 {
			q.refuse("other")
		}
		q.letGo(device)
	})
	_, err = vm.state(limited(t)) // answered after all the events
	vm.disks.mu.Unlock()
	must(t, err)
	select {
	case <-a.Gone:
	case <-limited(t).Done():
		t.Error("the disk has left, and nobody knows")
	}
}

// All disks leave while there is no connection. Their events are more than a subscriber's buffer
// holds.
func TestDisksThatLeaveUnseenAreAllKnownToHave(t *testing.T) {
	vm, q := fakeVM(t)
	vm.disks.bridges = maxBridges
	stay, err := vm.AttachDisk(limited(t), Disk{ID: "stays", Path: image(t, mib)})
	must(t, err)
	var gone []<-chan struct{}
	for i := range 200 {
		a, err := vm.AttachDisk(limited(t), Disk{ID: fmt.Sprint("d", i), Path: image(t, mib)})
		must(t, err)
		gone = append(gone, a.Gone)
	}
	for range 2 {
		events := vm.QMP().Subscribe("DEVICE_DELETED")
		before := vm.QMP().Connection()
		q.with(func() {
			for id := range q.devices {
				if id != deviceOf(vm, "stays") {
					delete(q.devices, id)
				}
			}
			q.conn.Close()
		})
		for vm.QMP().Connection() == before {
			_, err := vm.state(limited(t)) // waits for the next connection
			must(t, err)
		}
		for i, g := range gone {
			select {
			case <-g:
			default:
				t.Errorf("disk %d of %d is not gone", i, len(gone))
			}
		}
		if gone == nil && len(events.Events()) != 0 {
			t.Errorf("%d events of disks that were said to be gone already", len(events.Events()))
		}
		gone = nil
	}
	select {
	case <-stay.Gone:
		t.Error("a disk that stays is gone")
	default:
	}
}

// The guest powers off while the QMP connection is cut: QEMU exits with status 0, and the reason is
// lost.
func TestUnknownEndIsNotReportedAsACrash(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp.sock")
	l, err := net.Listen("unix", path)
	must(t, err)
	q := newFakeQEMU()
	go q.serve(l)
	vm := vmOn(t, path)
	q.answerBy(func(string, json.RawMessage) (any, *qmp.Error, bool) { return nil, nil, false })
	vm.events, vm.done = vm.qmp.Subscribe("SHUTDOWN"), make(chan struct{})
	go vm.supervise()
	l.Close()
	q.with(func() { q.conn.Close() })
	close(vm.qemu.done)
	got, err := vm.AwaitShutdown(limited(t))
	if want := (Shutdown{Reason: Unheard}); err != nil || got != want {
		t.Errorf("shutdown\nwant %+v\ngot  %+v, %v", want, got, err)
	}
	if err := (Machine{vm}).AwaitEnd(limited(t)); !errors.Is(err, sandbox.ErrEnded) || !errors.Is(err, sandbox.ErrUnheard) || !strings.Contains(err.Error(), "exited with 0") {
		t.Errorf("end of the machine\nwant %v, QEMU exited with 0, %v\ngot  %v", sandbox.ErrEnded, sandbox.ErrUnheard, err)
	}
}

// An attach was interrupted, and its image file was replaced. A new attach must not confuse the two
// files.
func TestAttachOfAnotherFileByTheSameNameIsRefused(t *testing.T) {
	for _, cutOff := range []bool{true, false} {
		vm, q := fakeVM(t)
		d := Disk{ID: "data", Path: image(t, mib)}
		if cutOff {
			cutAttach(t, vm, q, d)
		} else {
			_, err := vm.AttachDisk(limited(t), d)
			must(t, err)
		}
		must(t, os.Rename(image(t, 2*mib), d.Path))
		if _, err := vm.AttachDisk(limited(t), d); !errors.Is(err, ErrAttached) || !strings.Contains(err.Error(), "is another file now") {
			t.Errorf("cut off %v\nwant %v\ngot  %v", cutOff, ErrAttached, err)
		}
		must(t, vm.DetachDisk(limited(t), "data"))
		_, err := vm.AttachDisk(limited(t), d)
		must(t, err)
		want, err := os.Stat(d.Path)
		must(t, err)
		if got, err := vm.disks.find("data").store.File().Stat(); err != nil || !os.SameFile(want, got) {
			t.Errorf("the disk after a detach\nwant the file that %s is\ngot  %v, %v", d.Path, got, err)
		}
	}
}

// cutAttach attaches a disk, and gives up when QEMU gets its device.
func cutAttach(t *testing.T, vm *VM, q *fakeQEMU, d Disk) {
	t.Helper()
	ctx, giveUp := context.WithCancel(limited(t))
	goOn := make(chan struct{})
	q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command == "device_add" {
			giveUp()
			<-goOn
		}
		return nil, nil, false
	})
	if _, err := vm.AttachDisk(ctx, d); !errors.Is(err, context.Canceled) {
		t.Fatalf("want it given up\ngot  %v", err)
	}
	close(goOn)
	q.answerBy(nil)
}

// TestAttachThatIsRepeatedWhileItsStoreClosesPassesNoOtherFile: close(2) frees a descriptor's
// number before it writes back. So another file of this process may get the number while a hanging
// store is still closing.
func TestAttachThatIsRepeatedWhileItsStoreClosesPassesNoOtherFile(t *testing.T) {
	device, die, thaw := deadDevice(t)
	vm, q := fakeVM(t)
	refuse, number := true, -1
	ctx, giveUp := context.WithCancel(limited(t))
	q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command != "device_add" || !refuse {
			return nil, nil, false
		}
		refuse = false
		dead := vm.disks.find("dead")
		number = int(dead.store.File().Fd())
		die(dead.store.File())
		whenItCloses(dead, giveUp)
		return nil, &qmp.Error{Class: "GenericError", Desc: "no"}, true
	})
	attach := func(ctx context.Context) error {
		_, err := vm.AttachDisk(ctx, Disk{ID: "dead", Path: device})
		return err
	}
	if err := attach(ctx); err == nil {
		t.Error("an attach that QEMU refuses: want an error")
	}
	other := image(t, mib)
	for range 50 {
		file, err := os.Open(other)
		must(t, err)
		defer file.Close()
		if int(file.Fd()) == number {
			break
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := attach(ctx); err == nil {
		t.Error("an attach of a store that closes: want an error")
	}
	q.with(func() {
		if len(q.sets) != 0 || len(q.devices) != 0 {
			t.Errorf("QEMU has\nwant no file and no device\ngot  %v, %v", q.sets, q.devices)
		}
	})
	thaw()
	<-vm.disks.find("dead").close()
	must(t, vm.DetachDisk(limited(t), "dead"))
	end(vm)
}
