package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/sandbox"
)

func leavingDisk(id string) *disk {
	return &disk{Disk: Disk{ID: id}, gone: make(chan struct{}), requests: requests{refused: make(chan struct{})}}
}

// deafHotplug returns a hotplug whose guest obeys no request, and the number of requests.
func deafHotplug() (h *hotplug, asked *int) {
	asked = new(int)
	h = newHotplug(func(_ context.Context, d *disk) (bool, error) {
		*asked++
		h.asks(d)
		d.request()
		d.answer(true)
		return false, nil
	})
	return h, asked
}

// While the guest does not release a disk, other callers are refused after hotplugLimit, with an
// error that names the disk. Later callers ask the guest once more, and wait only as long as the
// guest has for that request.
func TestGuestThatKeepsADiskHoldsUpOthersForALimitedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, asked := deafHotplug()
		kept, other := leavingDisk("kept"), leavingDisk("other")
		h.ask(t.Context(), kept)
		for _, want := range []time.Duration{hotplugLimit, askAgain, askAgain} {
			began := time.Now()
			if _, err := h.take(t.Context(), other); !errors.Is(err, ErrHotplugHeld) {
				t.Errorf("want %v\ngot  %v", ErrHotplugHeld, err)
			}
			if took := time.Since(began); took != want {
				t.Errorf("waited\nwant %v\ngot  %v", want, took)
			}
		}
		if want := 1 + int(hotplugLimit/askAgain) + 1; *asked < want {
			t.Errorf("the guest was asked\nwant %d times or more\ngot  %d", want, *asked)
		}
		done, err := h.take(t.Context(), kept)
		if err != nil {
			t.Errorf("the disk itself is tried again: %v", err)
		}
		done()
		kept.leaves()
		if done, err = h.take(t.Context(), other); err != nil {
			t.Errorf("when it has left: %v", err)
		}
		done()
	})
}

// Repeating a detach must not extend the time for which other disks wait.
func TestRepeatedDetachDelaysOthersNoLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, _ := deafHotplug()
		kept := leavingDisk("kept")
		h.ask(t.Context(), kept)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), hotplugLimit/2)
		defer cancel()
		<-ctx.Done()
		h.ask(t.Context(), kept)
		if _, err := h.take(t.Context(), leavingDisk("other")); !errors.Is(err, ErrHotplugHeld) || time.Since(began) != hotplugLimit {
			t.Errorf("after %v\nwant %v\ngot  %v", time.Since(began), ErrHotplugHeld, err)
		}
	})
}

// QEMU may report "no such device" at once, but its DEVICE_DELETED event comes when the device is
// freed. By then the same disk's next device may exist.
func TestLateEndOfADeviceIsNotThatOfTheNext(t *testing.T) {
	vm, q := fakeVM(t)
	d := Disk{ID: "data", Path: image(t, mib)}
	_, err := vm.AttachDisk(limited(t), d)
	must(t, err)
	var first string
	q.with(func() { // another QMP client has unplugged the device
		for first = range q.devices {
		}
		delete(q.devices, first)
	})
	must(t, vm.DetachDisk(limited(t), "data"))
	ends := func() { q.event("DEVICE_DELETED", `{"device": "%s", "path": "/machine/peripheral/%[1]s"}`, first) }
	q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command == "blockdev-add" || command == "device_add" {
			ends()
		}
		return nil, nil, false
	})
	again, err := vm.AttachDisk(limited(t), d)
	must(t, err)
	q.with(ends)
	_, err = vm.AttachDisk(limited(t), Disk{ID: "other", Path: image(t, mib)})
	must(t, err)
	q.with(func() {
		for device := range q.devices {
			if q.drives[device] == RawNode("other") {
				q.letGo(device)
			}
		}
	})
	other, _ := vm.Disk("other")
	<-other.Gone // its event follows the events of the first device
	select {
	case <-again.Gone:
		t.Error("it was attached, and is said to be gone")
	default:
	}
	must(t, vm.DetachDisk(limited(t), "data"))
	q.with(func() {
		if len(q.devices) != 0 {
			t.Errorf("left behind: %v", q.devices)
		}
	})
}

// The report that the device had left was wrong.
func TestDiskThatIsStillThereAfterItsEventIsDetached(t *testing.T) {
	vm, q := fakeVM(t)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)})
	must(t, err)
	vm.disks.allGone()
	must(t, vm.DetachDisk(limited(t), "data"))
	q.with(func() {
		if len(q.devices) != 0 || len(q.nodes) != 0 || len(q.sets) != 0 {
			t.Errorf("left behind: devices %v, nodes %v, sets %v", q.devices, q.nodes, q.sets)
		}
	})
}

func TestDisksComeAndGoInTheirCallersOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, _ := deafHotplug()
		done, err := h.take(t.Context(), leavingDisk("first"))
		if err != nil {
			t.Fatal(err)
		}
		var order []int
		for i := range 5 {
			go func() {
				done, err := h.take(t.Context(), leavingDisk("later"))
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, i)
				done()
			}()
			synctest.Wait()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := h.take(ctx, leavingDisk("gives up")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a caller that gives up\nwant %v\ngot  %v", context.DeadlineExceeded, err)
		}
		done()
		synctest.Wait()
		if want := []int{0, 1, 2, 3, 4}; !slices.Equal(order, want) {
			t.Errorf("order\nwant %v\ngot  %v", want, order)
		}
	})
}

// While the guest has not answered an unplug request, nothing else must be asked of it: it would
// not see an added disk, and a second removal could hit the wrong disk.
func TestNothingIsAddedBesideARemoval(t *testing.T) {
	vm, q := fakeVM(t)
	a, err := vm.AttachDisk(limited(t), Disk{ID: "a", Path: image(t, mib)})
	must(t, err)
	_, err = vm.AttachDisk(limited(t), Disk{ID: "b", Path: image(t, mib)})
	must(t, err)
	givenUpDetach(t, vm, q, "a")
	// short calls with a context that ends when the call waits for a, and would ask for it again.
	short := func(do func(context.Context) error) error {
		ctx, giveUp := context.WithCancel(limited(t))
		defer giveUp()
		vm.hotplug.ask = func(context.Context, *disk) (bool, error) { giveUp(); return false, nil }
		vm.hotplug.mu.Lock()
		vm.hotplug.last = time.Time{}
		vm.hotplug.mu.Unlock()
		return do(ctx)
	}
	late := Disk{ID: "late", Path: image(t, mib)}
	for name, call := range map[string]func(context.Context) error{
		"attach": func(ctx context.Context) error { _, err := vm.AttachDisk(ctx, late); return err },
		"detach": func(ctx context.Context) error { return vm.DetachDisk(ctx, "b") },
	} {
		err := typed(short(call))
		if !errors.Is(err, ErrHotplugHeld) || !errors.Is(err, context.Canceled) {
			t.Errorf("%s\nwant %v\ngot  %v", name, ErrHotplugHeld, err)
		}
		if is := errors.Is(err, sandbox.ErrNotAsked); is != (name == "detach") {
			t.Errorf("%s: it is %v: %v", name, sandbox.ErrNotAsked, is)
		}
	}
	q.with(func() {
		if q.devices[deviceOf(vm, "late")] || q.leaving[deviceOf(vm, "b")] {
			t.Errorf("beside a removal: devices %v, asked for %v", q.devices, q.leaving)
		}
		q.letGo(deviceOf(vm, "a"))
		q.guestLetsGo = true
	})
	<-a.Gone
	_, err = vm.AttachDisk(limited(t), late)
	must(t, err)
	must(t, vm.DetachDisk(limited(t), "a"))
	must(t, vm.DetachDisk(limited(t), "b"))
}

// No detach is running when the guest ejects a disk by itself.
func TestDiskThatLeavesByItselfIsLogged(t *testing.T) {
	vm, q := fakeVM(t)
	d := Disk{ID: "data", Path: image(t, mib)}
	a, err := vm.AttachDisk(limited(t), d)
	must(t, err)
	q.with(func() { q.letGo(deviceOf(vm, "data")) })
	<-a.Gone
	if _, err := vm.AttachDisk(limited(t), d); !errors.Is(err, ErrAttached) {
		t.Errorf("before what is left of it was detached\nwant %v\ngot  %v", ErrAttached, err)
	}
	must(t, vm.DetachDisk(limited(t), "data"))
	_, err = vm.AttachDisk(limited(t), d)
	must(t, err)
}

// QEMU carries out a device_add whose caller has given up. The next attach must find the device.
func TestAttachThatWasCutOffIsTakenUp(t *testing.T) {
	for _, command := range []string{"blockdev-add", "device_add"} {
		t.Run(command, func(t *testing.T) {
			vm, q := fakeVM(t)
			goOn := make(chan struct{})
			ctx, giveUp := context.WithCancel(limited(t))
			q.answerBy(func(c string, arguments json.RawMessage) (any, *qmp.Error, bool) {
				if c == command {
					giveUp()
					<-goOn // the answer comes late
				}
				return nil, nil, false
			})
			d := Disk{ID: "data", Path: image(t, mib)}
			if _, err := vm.AttachDisk(ctx, d); !errors.Is(err, context.Canceled) {
				t.Errorf("want %v\ngot  %v", context.Canceled, err)
			}
			close(goOn)
			if _, err := vm.AttachDisk(limited(t), d); err != nil {
				t.Errorf("again: %v", err)
			}
			q.with(func() {
				added := 0
				for _, c := range q.commands {
					if c == "device_add" {
						added++
					}
				}
				if added != 1 || len(q.nodes) != 2 {
					t.Errorf("want one device_add and two nodes\ngot  %d and %v", added, q.nodes)
				}
			})
			must(t, vm.DetachDisk(limited(t), "data"))
		})
	}
}

// An attach was interrupted, and then the guest released its disk. The next attach must start from
// the beginning.
func TestAttachThatWasCutOffAndLostItsDiskBeginsAnew(t *testing.T) {
	vm, q := fakeVM(t)
	d := Disk{ID: "data", Path: image(t, mib)}
	cutAttach(t, vm, q, d)
	_, err := vm.state(limited(t)) // QEMU has carried out the device_add
	must(t, err)
	gone := vm.disks.find("data").whenGone()
	q.with(func() { q.letGo(deviceOf(vm, "data")) })
	<-gone
	a, err := vm.AttachDisk(limited(t), d)
	must(t, err)
	select {
	case <-a.Gone:
		t.Error("it was attached, and is said to be gone")
	default:
	}
	must(t, vm.DetachDisk(limited(t), "data"))
}

// sandbox.Machine requires this.
func TestAttachThatIsRepeatedChangesNothing(t *testing.T) {
	vm, q := fakeVM(t)
	d := sandbox.Disk{ID: "data", Path: image(t, mib)}
	attach := func() (sandbox.Place, error) { return (Machine{vm}).Attach(limited(t), d) }
	first, err := attach()
	must(t, err)
	var before []string
	q.with(func() { before = slices.Clone(q.commands) })
	again, err := attach()
	if err != nil || again != first {
		t.Errorf("again\nwant %v\ngot  %v, %v", first, again, err)
	}
	q.with(func() {
		if !slices.Equal(q.commands, before) {
			t.Errorf("commands to QEMU\nwant none after %v\ngot  %v", before, q.commands)
		}
	})
	d.ReadOnly = true
	if _, err := attach(); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("as another disk\nwant %v\ngot  %v", sandbox.ErrBusy, err)
	}
	d.ReadOnly = false
	givenUpDetach(t, vm, q, "data")
	if _, err := attach(); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("while it leaves\nwant %v\ngot  %v", sandbox.ErrBusy, err)
	}
}

// The same holds if the attach was interrupted before the guest was asked to release the disk.
func TestAttachTakesUpNoDiskThatLeaves(t *testing.T) {
	vm, q := fakeVM(t)
	d := Disk{ID: "data", Path: image(t, mib)}
	cutAttach(t, vm, q, d)
	givenUpDetach(t, vm, q, "data")
	if _, err := vm.AttachDisk(limited(t), d); !errors.Is(err, ErrAttached) {
		t.Errorf("want %v\ngot  %v", ErrAttached, err)
	}
}

// QEMU's main loop must not read a hanging store when the disk's device is added.
func TestGeometryIsAlwaysGiven(t *testing.T) {
	d := &disk{Disk: Disk{ID: "data"}, slot: slot{1, 1}}
	if o := d.deviceOptions(); o.Cylinders < 1 || o.Cylinders > 65535 || o.Heads < 1 || o.Heads > 255 || o.Sectors < 1 || o.Sectors > 255 {
		t.Errorf("want a geometry that QEMU takes\ngot  %d, %d, %d", o.Cylinders, o.Heads, o.Sectors)
	}
}
