package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/trial"
)

// trialLimit is how long a store may take for the small read that precedes QEMU's closing or
// growing it.
const trialLimit = 10 * time.Second

// tryStore tries the store that QEMU has open, even if its path now leads elsewhere. A process
// whose descriptors no other process may look at (PR_SET_DUMPABLE of prctl(2)) has the path tried
// instead.
func (vm *VM) tryStore(ctx context.Context, d *disk) error {
	err := d.trials.Read(ctx, d.store.Handle(), trialLimit)
	if errors.Is(err, trial.ErrUnreached) {
		vm.isHidden(d, err)
		err = d.trials.Read(ctx, d.Path, trialLimit)
	}
	if err != nil {
		return fmt.Errorf("disk %s (%s): %w", d.ID, d.Path, err)
	}
	return nil
}

// isHidden warns once that stores are tried by their paths, unless the disk's store was closed
// meanwhile.
func (vm *VM) isHidden(d *disk, err error) {
	if _, closed := os.Readlink(d.store.Handle()); closed != nil {
		return
	}
	vm.hidden.Do(func() {
		vm.log.WithError(err).Warn("stores are tried by their paths, as no other process reaches this one's descriptors: if a path leads elsewhere by now and the store hangs, its disk stops the VM when it grows or goes")
	})
}

// answers returns an error if the disk's store hangs, or may hang (trial.ErrHangs,
// trial.ErrUntried). A store that fails in another way may still be removed, and so may one that
// cannot be reached for a trial: its disk could not be detached otherwise.
func (vm *VM) answers(ctx context.Context, d *disk) error {
	err := vm.try(ctx, d)
	if errors.Is(err, trial.ErrHangs) || errors.Is(err, trial.ErrUntried) || err != nil && ctx.Err() != nil {
		return err
	}
	return nil
}

// setName returns the file name by which QEMU's block nodes find the descriptor of a disk's store.
func (d *disk) setName() string { return fmt.Sprintf("/dev/fdset/%d", d.number) }

// addStore passes a disk's store to QEMU by descriptor, and adds the block node that uses it. When
// the QMP connection ends, a running QEMU drops sets of descriptors that no node uses
// (monitor_fdset_cleanup in monitor/misc.c); addStore then passes the descriptor again. again means
// that QEMU may already have the descriptor.
func (vm *VM) addStore(ctx context.Context, d *disk, again bool) error {
	for cuts := 0; ; cuts++ {
		connection := vm.qmp.Connection()
		err := vm.passStore(ctx, d, again || cuts > 0)
		if err == nil {
			err = vm.execute(ctx, "blockdev-add", d.fileNode(d.setName()), nil)
		}
		if err == nil || ctx.Err() != nil || cuts == maxCuts || vm.qmp.Connection() == connection {
			return err
		}
	}
}

// passStore gives QEMU a descriptor of a disk's store, in a set of its own, unless QEMU has the set
// already.
func (vm *VM) passStore(ctx context.Context, d *disk, again bool) error {
	if again {
		if now, err := vm.state(ctx); err != nil || now.sets[d.number] {
			return err
		}
	}
	arguments := map[string]any{"fdset-id": d.number, "opaque": d.ID}
	return vm.explained(ctx, vm.decided(ctx, "add-fd", arguments, func() error {
		return vm.qmp.ExecuteWithFile(ctx, "add-fd", arguments, nil, d.store.File())
	}))
}

// takeStore removes the descriptor from QEMU after its nodes are removed. A QEMU whose machine is
// paused marks the descriptor as removed, keeps it open, and closes it only at the next remove-fd
// while the machine runs (monitor_fdset_cleanup in monitor/misc.c). takeStore fails then, because a
// block device stays in use as long as QEMU has it open.
func (vm *VM) takeStore(ctx context.Context, d *disk) error {
	for before := (state{}); ; {
		err := vm.execute(ctx, "remove-fd", map[string]int{"fdset-id": d.number}, nil)
		if answer := new(qmp.Error); err != nil && !errors.As(err, &answer) {
			return err
		}
		now, stateErr := vm.state(ctx) // QEMU has no error class for "there is no such set"
		switch {
		case stateErr != nil:
			return stateErr
		case !now.sets[d.number]:
			return nil
		case err != nil:
			return err
		case now.run != running || before.run == running:
			return keptOpen(now.run)
		}
		before = now // the machine may have run only since the command
	}
}

// keptOpen returns the error for a store that a QEMU in a run state has not closed.
func keptOpen(run string) error {
	switch run {
	case running: // it was paused for a moment
		return errors.New("QEMU still has its store open: detach the disk again")
	case "guest-panicked", "internal-error", "shutdown": // cont is refused, or continues a dead guest
		return fmt.Errorf("QEMU keeps its store open until it ends, because the machine is in the state %s and does not run again: kill the machine", run)
	}
	return fmt.Errorf("QEMU keeps its store open as long as the machine is %s: detach the disk again when the machine runs", run)
}
