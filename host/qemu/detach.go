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
	// hotplugLimit is how long other disks wait until the guest has released one disk.
	hotplugLimit = 30 * time.Second
	// askAgain is the interval after which a guest that has not released a disk is asked again: a
	// booting guest misses the first request.
	askAgain = 5 * time.Second
	// firstDoubt is the first interval for asking again after a refusal that may answer an earlier
	// request. The interval doubles each time.
	firstDoubt = 20 * time.Millisecond
	maxDoubts  = 8 // firstDoubt<<maxDoubts is more than askAgain
)

// ErrKept means that the guest refused to release a disk on detach. The disk stays attached.
var ErrKept = errors.New("the guest refused to release it")

// errNotAsked means that a detach has failed before the guest was asked for anything.
var errNotAsked = errors.New("the guest was not asked to release it")

// notAsked is an error that is errNotAsked too. Its text is unchanged.
type notAsked struct{ error }

func (e notAsked) Unwrap() []error { return []error{e.error, errNotAsked} }

// DetachDisk removes a disk from the VM: it asks the guest to release the disk, waits until the
// guest has done so, and removes the block nodes. The caller must make sure that nothing in the
// guest uses the disk, because the guest's kernel does not refuse. Detaching a disk that the VM
// does not have succeeds. A detach that failed half way resumes where it stopped. No detach
// succeeds while the machine is paused, because QEMU keeps the store open then.
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
		return fmt.Errorf("detach %w", notAsked{err})
	}
	defer d.unlock()
	if d.slot.bridge == 0 {
		return fmt.Errorf("detach disk %s: it is a boot disk, on a bus without hotplug, and cannot be detached", id)
	}
	err = vm.unplugAndRemove(ctx, d)
	if errors.Is(err, errThere) { // the disk was wrongly recorded as gone
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

// remove removes the nodes and the store of a disk whose device is gone.
func (vm *VM) remove(ctx context.Context, d *disk) error {
	if err := vm.removeNodes(ctx, d); err != nil {
		return err
	}
	d.leaves() // an attach must not continue with a store that is being closed
	return vm.disks.release(ctx, d)
}

// unplug removes a disk's device and waits until it is gone. For up to hotplugLimit, no other disk
// is attached or detached meanwhile.
func (vm *VM) unplug(ctx context.Context, d *disk) error {
	if d.isGone() {
		return nil
	}
	done, err := vm.hotplug.take(ctx, d)
	if err != nil {
		return notAsked{err}
	}
	// After the time limit the other disks may proceed; they learn which disk is late.
	limit := time.AfterFunc(vm.hotplug.left(d), done)
	defer func() {
		limit.Stop()
		done()
	}()
	doubts := 0
	for asked := false; ; asked = true {
		refused := d.refusal()
		if err := vm.awaitRequests(ctx, d); err != nil && !asked {
			return notAsked{err}
		} else if err != nil {
			return err
		}
		vm.hotplug.asks(d)
		if gone, err := vm.sendUnplug(ctx, d, d.request()); gone || err != nil {
			return err
		}
		if again, err := vm.awaitLeaving(ctx, d, refused, &doubts); !again {
			return err
		}
	}
}

// awaitLeaving waits until the guest has released a disk. It returns again = true when the guest
// should be asked once more. After a refusal that may answer an earlier request, that happens soon,
// and later each further time.
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
			return false, fmt.Errorf("the guest has not released it yet, and may do so later: %w", ctx.Err())
		}
	}
}

// requestAgain repeats another call's request to release a disk. The caller waits for that disk and
// holds the hotplug turn. A disk that the guest refused to release is not asked for again: it may
// be mounted again.
func (vm *VM) requestAgain(ctx context.Context, d *disk) (gone bool, err error) {
	if err := vm.awaitRequests(ctx, d); err != nil {
		return false, err
	}
	if !d.requestAgain() {
		return d.isGone(), nil
	}
	vm.hotplug.asks(d)
	return vm.sendUnplug(ctx, d, true)
}

// sendUnplug sends a request that is already recorded. The caller has called awaitRequests before:
// a request that is refused must not be recorded. It holds the hotplug turn, or has held it for
// this disk; otherwise the name could become another disk's. asked is true if an earlier request
// was sent.
func (vm *VM) sendUnplug(ctx context.Context, d *disk, asked bool) (gone bool, err error) {
	err = vm.send(ctx, "device_del", map[string]string{"id": d.device()}, nil)
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
	case asked: // "already in the process of unplug", for which QEMU has no error class
		return false, nil
	default:
		d.stays()
		return false, notAsked{err}
	}
}

// hasLeft records that a disk has left, and reports whether it was recorded for the first time.
func (vm *VM) hasLeft(d *disk) bool {
	left, byItself := d.leaves()
	if byItself {
		vm.log.Warnf("disk %s (%s) has left the VM without a detach", d.ID, d.Path)
	}
	return left
}

// watchDisks processes the guest's disk events until the QMP connection ends. If events were
// dropped, watchDisks asks QEMU for its devices, because a departure must not be missed. A dropped
// refusal needs nothing: the guest is asked again anyway.
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
	case d == nil: // a part of a disk, or not a disk of this VM
	case event.Name == "DEVICE_DELETED":
		vm.hasLeft(d)
	default:
		d.refuses(event.Time)
	}
}

// takeStock asks QEMU for its devices until QEMU answers, and records the disks that have left. It
// returns false when the connection has ended for good.
func (vm *VM) takeStock() bool {
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		_, _, err := vm.whatHasLeft(context.Background(), vm.qmp.Execute)
		if err == nil {
			return true
		}
		vm.log.WithError(err).Warn("QMP events were lost, and QEMU does not list its devices")
		select {
		case <-again.C:
		case <-vm.qmp.Done():
			return false
		}
	}
}
