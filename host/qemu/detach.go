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
	// askAgain is after how long a guest that has not let go of a disk is asked again: one that boots misses the first request.
	askAgain = 5 * time.Second
)

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
	if err := vm.unplug(ctx, d); err != nil {
		return fmt.Errorf("detach disk %s: %w", id, err)
	}
	if err := vm.removeNodes(ctx, id); err != nil {
		return fmt.Errorf("detach disk %s: %w", id, err)
	}
	vm.disks.release(d)
	return nil
}

// unplug removes a disk's device and waits until it is gone.
func (vm *VM) unplug(ctx context.Context, d *disk) error {
	events := vm.qmp.Subscribe("DEVICE_DELETED", "DEVICE_UNPLUG_GUEST_ERROR")
	defer events.Close()
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for {
		if gone, err := vm.requestUnplug(ctx, d); gone || err != nil {
			return err
		}
		if gone, err := vm.awaitUnplug(ctx, d, events, again.C); gone || err != nil {
			return err
		}
	}
}

// requestUnplug asks the guest to let go of a disk.
func (vm *VM) requestUnplug(ctx context.Context, d *disk) (gone bool, err error) {
	asked := d.unplugged
	d.unplugged = true // also where the answer does not come
	err = vm.execute(ctx, "device_del", map[string]string{"id": DeviceID(d.ID)}, nil)
	answer := new(qmp.Error)
	switch {
	case err == nil:
		return false, nil
	case !errors.As(err, &answer):
		return false, err
	case answer.Class == qmp.DeviceNotFound:
		return true, nil
	case asked: // "already in the process of unplug", which has no error class of its own
		return false, nil
	default:
		d.unplugged = false
		return false, err
	}
}

// awaitUnplug waits for what comes of a request, or until it is time to ask again.
func (vm *VM) awaitUnplug(ctx context.Context, d *disk, events *qmp.Subscription, again <-chan time.Time) (gone bool, err error) {
	for {
		select {
		case event, open := <-events.Events():
			if !open {
				return false, vm.explain(ctx, vm.qmp.Err())
			}
			var data struct {
				Device string `json:"device"`
			}
			if err := json.Unmarshal(event.Data, &data); err != nil || data.Device != DeviceID(d.ID) {
				continue // of another device
			}
			if event.Name == "DEVICE_DELETED" {
				return true, nil
			}
			return false, errors.New("the guest refused to let go of it")
		case <-again:
			return false, nil
		case <-ctx.Done():
			return false, fmt.Errorf("the guest has not let go of it: %w", ctx.Err())
		}
	}
}
