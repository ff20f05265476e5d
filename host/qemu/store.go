package qemu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/trial"
)

// trialLimit is how long a store has for the small read that is made before QEMU closes it or makes it longer.
const trialLimit = 10 * time.Second

// tryStore tries the store that QEMU has, whatever its path leads to by now.
func tryStore(ctx context.Context, d *disk) error {
	if err := d.trials.Read(ctx, d.store.Handle(), trialLimit); err != nil {
		return fmt.Errorf("disk %s (%s): %w", d.ID, d.Path, err)
	}
	return nil
}

// answers refuses a disk whose store hangs, or may (trial.ErrHangs, trial.ErrUntried). One that fails otherwise may go.
func (vm *VM) answers(ctx context.Context, d *disk) error {
	err := vm.try(ctx, d)
	if errors.Is(err, trial.ErrHangs) || errors.Is(err, trial.ErrUntried) || err != nil && ctx.Err() != nil {
		return err
	}
	return nil
}

// setName is the file name by which QEMU's block nodes find the descriptor of a disk's store.
func (d *disk) setName() string { return fmt.Sprintf("/dev/fdset/%d", d.number) }

// addStore passes a disk's store to QEMU by descriptor, and adds the block node that uses it. A running QEMU drops a set of
// descriptors that no node uses when its QMP client has gone (monitor_fdset_cleanup in monitor/misc.c): then it is passed again.
// With again QEMU may have the descriptor already.
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

// passStore gives QEMU a descriptor of a disk's store, in a set of its own, where it has none yet.
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

// takeStore takes the descriptor from QEMU, when no node uses it any more. A QEMU whose machine stands still keeps it open until it
// runs again.
func (vm *VM) takeStore(ctx context.Context, d *disk) error {
	err := vm.execute(ctx, "remove-fd", map[string]int{"fdset-id": d.number}, nil)
	if answer := new(qmp.Error); !errors.As(err, &answer) {
		return err
	}
	now, stateErr := vm.state(ctx) // QEMU has no error class for "there is no such set"
	if stateErr != nil {
		return stateErr
	}
	if now.sets[d.number] {
		return err
	}
	return nil
}
