package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/directvol/directvol/host/qmp"
)

// refuse makes the guest refuse to release a device.
func (q *fakeQEMU) refuse(device string) {
	delete(q.leaving, device)
	q.event("DEVICE_UNPLUG_GUEST_ERROR", `{"device": "%s", "path": "/machine/peripheral/%[1]s"}`, device)
}

// refuseAfterAnswer makes the guest refuse after the host knows that QEMU took the request.
func (q *fakeQEMU) refuseAfterAnswer(vm *VM, id string) {
	d := vm.disks.find(id)
	d.awaitRequest(context.Background())
	q.with(func() { q.refuse(d.device()) })
}

// awaitRequest waits until QEMU has taken a request for the disk.
func (d *disk) awaitRequest(ctx context.Context) {
	for ; ctx.Err() == nil; runtime.Gosched() {
		d.mu.Lock()
		taken := d.asked && d.open == 0
		d.mu.Unlock()
		if taken {
			return
		}
	}
}

// givenUpDetach asks a guest that does not answer for a disk, and gives up when QEMU has taken the
// request.
func givenUpDetach(t *testing.T, vm *VM, q *fakeQEMU, id string) {
	t.Helper()
	q.with(func() { q.guestLetsGo = false })
	ctx, giveUp := context.WithCancel(limited(t))
	defer giveUp()
	go func() {
		vm.disks.find(id).awaitRequest(ctx)
		giveUp()
	}()
	if err := vm.DetachDisk(ctx, id); !errors.Is(err, context.Canceled) {
		t.Fatalf("want it given up\ngot  %v", err)
	}
}

// A refusal that arrived while no call waited does not answer the next request.
func TestOldRefusalIsNotTheNextAnswer(t *testing.T) {
	vm, q := fakeVM(t)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)})
	must(t, err)
	givenUpDetach(t, vm, q, "data")
	d := vm.disks.find("data")
	late := d.refusal()
	q.with(func() { q.refuse(deviceOf(vm, "data")) })
	<-late
	q.with(func() { q.guestLetsGo = true })
	if err := vm.DetachDisk(limited(t), "data"); err != nil {
		t.Errorf("the guest obeys the second request\nwant nil\ngot  %v", err)
	}
}

// A refusal proves that the disk stays only if no other request may still be obeyed.
func TestRefusalCountsForTheLastRequestAlone(t *testing.T) {
	d := leavingDisk("data")
	d.doubt = make(chan struct{}, 1)
	refused := func(refusal <-chan struct{}) string {
		select {
		case <-refusal:
			return "refused"
		case <-d.doubt:
			return "asked again"
		default:
			return "nothing"
		}
	}
	check := func(what, want string, when time.Time) {
		t.Helper()
		refusal := d.refusal()
		d.refuses(when)
		if got := refused(refusal); got != want {
			t.Errorf("%s\nwant %s\ngot  %s", what, want, got)
		}
	}
	check("nobody asked", "nothing", time.Now().Add(time.Second))
	d.request()
	check("before QEMU's answer", "asked again", time.Now().Add(time.Second))
	d.answer(true)
	check("of an earlier request", "nothing", d.sent.Add(-time.Second))
	check("between request and answer", "asked again", d.sent)
	d.request()
	d.answer(false)
	check("the request may be on its way", "asked again", time.Now().Add(time.Second))
	d.request()
	d.request()
	d.answer(true)
	check("one of two requests is on its way", "asked again", time.Now().Add(time.Second))
	d.answer(true)
	check("after the answer", "refused", d.answered.Add(time.Second))
	check("twice", "nothing", d.answered.Add(time.Second))
}

// A booting guest missed the request of a detach that has given up. A later caller that waits for
// the disk asks again.
func TestCallerThatWaitsForTheDiskAsksTheGuestAgain(t *testing.T) {
	for name, refuses := range map[string]bool{"it lets go": false, "it refuses": true} {
		t.Run(name, func(t *testing.T) {
			vm, q := fakeVM(t)
			for _, id := range []string{"a", "b"} {
				_, err := vm.AttachDisk(limited(t), Disk{ID: id, Path: image(t, mib)})
				must(t, err)
			}
			givenUpDetach(t, vm, q, "a")
			q.with(func() { delete(q.leaving, deviceOf(vm, "a")); q.guestLetsGo = true })
			vm.hotplug.mu.Lock()
			vm.hotplug.since = time.Now().Add(-time.Hour)
			vm.hotplug.last = vm.hotplug.since
			vm.hotplug.mu.Unlock()
			if refuses {
				q.answerBy(refuseOnce(vm, q, "a"))
			}
			must(t, vm.DetachDisk(limited(t), "b"))
		})
	}
}

// A caller that waits for a disk asks the guest again, but not after a refusal: the caller of the
// detach may have mounted the disk again.
func TestCallerThatWaitedDoesNotAskARefusingGuest(t *testing.T) {
	vm, q := fakeVM(t)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "a", Path: image(t, mib)})
	must(t, err)
	givenUpDetach(t, vm, q, "a")
	d := vm.disks.find("a")
	refused := d.refusal()
	q.with(func() { q.refuse(deviceOf(vm, "a")) })
	<-refused
	q.with(func() { q.guestLetsGo = true })
	if gone, err := vm.hotplug.ask(limited(t), d); gone || err != nil || d.leaving() {
		t.Errorf("the next request\nwant none\ngot  gone %v, leaving %v, %v", gone, d.leaving(), err)
	}
	q.with(func() {
		if !q.devices[deviceOf(vm, "a")] {
			t.Error("the guest has released a disk after its refusal, but the disk is not detached")
		}
	})
}

// refuseOnce returns a hook that makes the guest refuse its next request for a disk.
func refuseOnce(vm *VM, q *fakeQEMU, id string) func(string, json.RawMessage) (any, *qmp.Error, bool) {
	refused := false
	return func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command != "device_del" || refused {
			return nil, nil, false
		}
		refused = true
		go q.refuseAfterAnswer(vm, id)
		return struct{}{}, nil, true
	}
}
