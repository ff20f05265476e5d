package qemu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/host/qmp"
)

// AttachDisk attaches a disk to the running VM and returns its place in the guest. It does not wait
// until the guest sees the disk, which may take a moment.
//
// If the VM already has an identical Disk, AttachDisk succeeds without a change, and resumes an
// attach that was interrupted. Another Disk with the same id or the same store is refused until the
// old one is detached (ErrAttached), and so is a disk that has left or is leaving.
//
// A failed attach is undone. If undoing fails too, or if ctx has ended, the disk keeps its slot:
// calling AttachDisk again resumes the attach, and DetachDisk resumes undoing it. Undoing always
// fails while the machine is paused, because QEMU keeps the store open (takeStore): the disk stays
// half attached until a DetachDisk after the machine runs again.
func (vm *VM) AttachDisk(ctx context.Context, want Disk) (Attached, error) {
	d, err := vm.takeUp(ctx, want)
	if err == nil && d == nil {
		if err = vm.awaitRequests(ctx, nil); err != nil { // checked first, so that nothing needs undoing
			return Attached{}, fmt.Errorf("attach disk %s (%s): %w", want.ID, want.Path, err)
		}
		d, err = vm.disks.reserveIn(ctx, want)
	}
	if err != nil {
		return Attached{}, fmt.Errorf("attach %w", err)
	}
	defer d.unlock()
	if d.plugged.Load() {
		return d.attached(), nil
	}
	again := d.half
	d.half = true
	if err = vm.plug(ctx, d, again); err == nil {
		d.half = false
		d.plugged.Store(true)
		return d.attached(), nil
	}
	err = fmt.Errorf("attach disk %s (%s): %w", d.ID, d.Path, err)
	if ctx.Err() != nil {
		return Attached{}, err
	}
	if left := vm.remove(ctx, d); left != nil {
		return Attached{}, fmt.Errorf("%w; the attach is only partly undone, detach the disk to finish that: %w", err, left)
	}
	return Attached{}, err
}

// takeUp returns, locked, a disk that the VM already has or whose attach was interrupted. It
// returns nil if there is no such disk, or if the VM's disk with this id differs from want, has
// left or is leaving. It refuses a disk whose path now leads to another file. A half-attached disk
// that has left is undone: no caller has learned its place.
func (vm *VM) takeUp(ctx context.Context, want Disk) (*disk, error) {
	d, err := vm.disks.acquire(ctx, want.ID)
	if errors.Is(err, ErrNoDisk) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	switch {
	case d.Disk != want || d.leaving() || d.isGone() && !d.half:
	case d.isGone():
		if err = vm.remove(ctx, d); err != nil {
			err = fmt.Errorf("disk %s: undo an attach that was cut off: %w", d.ID, err)
		}
	default:
		if err = vm.disks.stillNamed(ctx, d); err == nil {
			return d, nil
		}
	}
	d.unlock()
	return nil, err
}

// plug adds a disk's nodes and its device. again means that some of them may already exist. The
// nodes need no hotplug turn, because the guest does not see them.
func (vm *VM) plug(ctx context.Context, d *disk, again bool) error {
	var now state
	if again {
		var err error
		if now, err = vm.state(ctx); err != nil {
			return err
		}
	}
	if !now.nodes[FileNode(d.ID)] {
		if err := vm.addStore(ctx, d, again); err != nil {
			return err
		}
	}
	if !now.nodes[RawNode(d.ID)] {
		if err := vm.execute(ctx, "blockdev-add", d.rawNode(FileNode(d.ID)), nil); err != nil {
			return err
		}
	}
	done, err := vm.hotplug.take(ctx, d)
	if err != nil {
		return err
	}
	defer done()
	if again {
		if now, err = vm.state(ctx); err != nil || now.devices[d.device()] {
			return err
		}
	}
	return vm.execute(ctx, "device_add", d.deviceOptions(), nil)
}

// removeNodes removes those of the disk's block nodes that exist, and takes the store from QEMU. It
// first tries the store again and leaves everything in place if the store may hang: the guest may
// have needed long to release the disk since the last try.
func (vm *VM) removeNodes(ctx context.Context, d *disk) error {
	if err := vm.answers(ctx, d); err != nil {
		return err
	}
	for _, node := range []string{RawNode(d.ID), FileNode(d.ID)} {
		if err := vm.removeNode(ctx, d, node); err != nil {
			return err
		}
	}
	return vm.takeStore(ctx, d)
}

const (
	// freeLimit is how long a node may stay in use after its device is gone. freeAgain is the
	// interval between attempts to remove the node.
	freeLimit = 5 * time.Second
	freeAgain = 10 * time.Millisecond
)

// errThere means that a node cannot be removed because QEMU still has the device that uses it.
var errThere = errors.New("QEMU has its device")

// removeNode removes one block node. QEMU reports a device as gone before freeing it; QEMU frees it
// later (RCU), without an event, and the node is in use until then. So removeNode retries after a
// refusal, and fails only if the device is still there or the node stays in use for freeLimit.
func (vm *VM) removeNode(ctx context.Context, d *disk, node string) error {
	again := time.NewTicker(freeAgain)
	defer again.Stop()
	limit := time.After(freeLimit)
	for {
		err := vm.change(ctx, d, "blockdev-del", map[string]string{"node-name": node})
		if answer := new(qmp.Error); !errors.As(err, &answer) && !errors.Is(err, ErrDiskHangs) {
			return err
		}
		// QEMU has no error class for "there is no such node".
		now, stateErr := vm.state(ctx)
		if stateErr != nil {
			return stateErr
		}
		if !now.nodes[node] {
			return nil
		}
		if errors.Is(err, ErrDiskHangs) {
			return err
		}
		if now.devices[d.device()] {
			return fmt.Errorf("%w: %w", errThere, err)
		}
		select {
		case <-again.C:
		case <-limit:
			return err
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, ctx.Err())
		}
	}
}
