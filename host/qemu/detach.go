package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/host/qmp"
)

const (
	// detachTimeout limits a DetachDisk whose context has no deadline.
	detachTimeout = time.Minute
	// hotplugLimit is how long other disks wait for a guest to let go of one.
	hotplugLimit = 30 * time.Second
	// askAgain is after how long a guest that has not let go of a disk is asked again: one that boots misses the first request.
	askAgain = 5 * time.Second
	// firstDoubt is after how long it is asked again where a refusal may have been of an earlier request; twice as long each time.
	firstDoubt = 20 * time.Millisecond
	maxDoubts  = 8 // more than askAgain
)

// ErrKept is the failure of a detach that the guest refuses: the disk stays.
var ErrKept = errors.New("the guest refused to let go of it")

// DetachDisk takes a disk from the VM: the guest is asked to let go of it, and when it has, the block nodes are removed. The
// caller sees to it that nothing in the guest uses the disk: the guest's kernel does not refuse. A disk that is not there is
// success; a detach that failed half way is taken up where it stopped.
func (vm *VM) DetachDisk(ctx context.Context, id string) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, detachTimeout)
		defer cancel()
	}
	d, err := vm.disks.acquire(ctx, id)
	if errors.Is(err, ErrNoDisk) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("detach %w", err)
	}
	defer d.unlock()
	if d.slot.bridge == 0 {
		return fmt.Errorf("detach disk %s: it is a boot disk, on a bus without hotplug: it stays as long as the VM", id)
	}
	err = vm.unplugAndRemove(ctx, d)
	if errors.Is(err, errThere) { // it was wrong that it had left
		d.isBack()
		err = vm.unplugAndRemove(ctx, d)
	}
	if err != nil {
		return fmt.Errorf("detach disk %s: %w", id, err)
	}
	return nil
}

func (vm *VM) unplugAndRemove(ctx context.Context, d *disk) error {
	if err := vm.unplug(ctx, d); err != nil {
		return err
	}
	return vm.remove(ctx, d)
}

// remove takes away what is left of a disk whose device is not there.
func (vm *VM) remove(ctx context.Context, d *disk) error {
	if err := vm.removeNodes(ctx, d); err != nil {
		return err
	}
	d.leaves() // no attach may go on with a store that closes
	return vm.disks.release(ctx, d)
}

// unplug removes a disk's device and waits until it is gone. No other disk comes or goes meanwhile, up to hotplugLimit.
func (vm *VM) unplug(ctx context.Context, d *disk) error {
	if d.isGone() {
		return nil
	}
	done, err := vm.hotplug.take(ctx, d)
	if err != nil {
		return err
	}
	// The others are let pass, and are told, when it takes too long.
	limit := time.AfterFunc(vm.hotplug.left(d), done)
	defer func() {
		limit.Stop()
		done()
	}()
	doubts := 0
	for {
		refused := d.refusal()
		if gone, err := vm.requestUnplug(ctx, d); gone || err != nil {
			return err
		}
		if again, err := vm.awaitLeaving(ctx, d, refused, &doubts); !again {
			return err
		}
	}
}

// awaitLeaving waits for a guest that was asked for a disk; again is set when it is to be asked once more. A refusal that leaves
// open which request it answers has that happen soon, and less soon each time.
func (vm *VM) awaitLeaving(ctx context.Context, d *disk, refused <-chan struct{}, doubts *int) (again bool, err error) {
	timer := time.NewTimer(askAgain)
	defer timer.Stop()
	for {
		select {
		case <-d.whenGone():
			return false, nil
		case <-refused:
			return false, ErrKept
		case <-timer.C:
			return true, nil
		case <-d.doubt:
			timer.Reset(min(firstDoubt<<*doubts, askAgain))
			*doubts = min(*doubts+1, maxDoubts)
		case <-vm.qmp.Done():
			return false, vm.explain(ctx, vm.qmp.Err())
		case <-ctx.Done():
			return false, fmt.Errorf("the guest has not let go of it, and still may: %w", ctx.Err())
		}
	}
}

// requestUnplug asks the guest to let go of a disk. It is for who has the turn of hotplug, or had it for this disk: beside it the
// name may become another disk's. Where QEMU would stand still the guest is not asked, and the disk does not count as one that leaves.
func (vm *VM) requestUnplug(ctx context.Context, d *disk) (gone bool, err error) {
	if err := vm.awaitRequests(ctx); err != nil {
		return false, err
	}
	vm.hotplug.asks(d)
	return vm.sendUnplug(ctx, d, d.request())
}

// requestAgain asks the guest once more for a disk that another call has asked for, for who waits for it in the turn of hotplug. One
// that the guest has refused to let go of may be mounted again.
func (vm *VM) requestAgain(ctx context.Context, d *disk) (gone bool, err error) {
	if !d.requestAgain() {
		return d.isGone(), nil
	}
	vm.hotplug.asks(d)
	return vm.sendUnplug(ctx, d, true)
}

// sendUnplug sends a request that was noted; asked says that it is not the first one.
func (vm *VM) sendUnplug(ctx context.Context, d *disk, asked bool) (gone bool, err error) {
	err = vm.execute(ctx, "device_del", map[string]string{"id": d.device()}, nil)
	answer := new(qmp.Error)
	d.answer(err == nil || errors.As(err, &answer))
	switch {
	case err == nil:
		return false, nil
	case !errors.As(err, &answer):
		return false, err
	case answer.Class == qmp.DeviceNotFound:
		d.leaves()
		return true, nil
	case asked: // "already in the process of unplug", which has no error class of its own
		return false, nil
	default:
		d.stays()
		return false, err
	}
}

// hasLeft notes that a disk has left, and reports whether that is new.
func (vm *VM) hasLeft(d *disk) bool {
	left, byItself := d.leaves()
	if byItself {
		vm.log.Warnf("disk %s (%s) has left the VM, and nobody detached it", d.ID, d.Path)
	}
	return left
}

// watchDisks takes in what the guest does with disks, until the connection ends. Where more comes than is read QEMU is asked what it
// has: a disk that has left must not be missed, and a refusal that was is asked for again.
func (vm *VM) watchDisks(events *qmp.Subscription) {
	missed := uint64(0)
	for event := range events.Events() {
		vm.diskEvent(event)
		for now := events.Dropped(); now > missed; now = events.Dropped() {
			if !vm.takeStock() {
				return
			}
			missed = now
		}
	}
}

func (vm *VM) diskEvent(event qmp.Event) {
	var data struct {
		Device string `json:"device"`
	}
	if err := json.Unmarshal(event.Data, &data); err != nil {
		vm.log.WithError(err).Warnf("QMP event %s: %s", event.Name, event.Data)
		return
	}
	d := vm.disks.byDevice(data.Device)
	switch {
	case d == nil: // a part of a disk, or none of ours
	case event.Name == "DEVICE_DELETED":
		vm.hasLeft(d)
	default:
		d.refuses(event.Time)
	}
}

// takeStock asks QEMU what it has until it answers, and notes the disks that have left. It returns false where the connection has
// ended for good.
func (vm *VM) takeStock() bool {
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		_, _, err := vm.whatHasLeft(context.Background(), vm.qmp.Execute)
		if err == nil {
			return true
		}
		vm.log.WithError(err).Warn("more QMP events came than were read, and QEMU does not say what it has")
		select {
		case <-again.C:
		case <-vm.qmp.Done():
			return false
		}
	}
}
