package qemu

import (
	"context"
	"errors"
	"fmt"
	"math"
)

// sectorSize is the unit of a block node's size.
const sectorSize = 512

// ErrShrink is the refusal to make a disk smaller: QEMU would obey, and cut off what is there.
var ErrShrink = errors.New("disks do not shrink")

// ResizeDisk grows a disk to so many bytes, a multiple of 512, while the guest uses it; a disk of that size already is left alone.
// A file is made larger; a block device must have been grown on the host before. A smaller size is refused (ErrShrink). QEMU
// answering OK proves nothing, so the size is read afterwards, and anything but what was asked for is an error.
func (vm *VM) ResizeDisk(ctx context.Context, id string, bytes uint64) error {
	d, err := vm.disks.acquire(ctx, id)
	if err != nil {
		return fmt.Errorf("resize %w", err)
	}
	defer d.unlock()
	if err := vm.resize(ctx, d, bytes); err != nil {
		return fmt.Errorf("resize disk %s (%s): %w", id, d.Path, err)
	}
	return nil
}

func (vm *VM) resize(ctx context.Context, d *disk, bytes uint64) error {
	if bytes%sectorSize != 0 || bytes > math.MaxInt64 {
		return fmt.Errorf("%d bytes: want a multiple of %d, at most %d", bytes, sectorSize, int64(math.MaxInt64))
	}
	size, err := vm.virtualSize(ctx, d.ID)
	switch {
	case err != nil:
		return err
	case bytes == size:
		return nil
	case d.ReadOnly:
		return errors.New("it is read-only")
	}
	// Somebody else may have grown a file, which QEMU then has not seen: block_resize would cut it.
	real, err := d.store.Bytes()
	if err != nil {
		return err
	}
	if size = max(size, real); bytes < size {
		return fmt.Errorf("%w: it has %d bytes, %d were asked for", ErrShrink, size, bytes)
	}
	arguments := struct {
		NodeName string `json:"node-name"`
		Size     uint64 `json:"size"`
	}{RawNode(d.ID), bytes}
	if err := vm.execute(ctx, "block_resize", arguments, nil); err != nil {
		return err
	}
	if size, err = vm.virtualSize(ctx, d.ID); err != nil {
		return err
	}
	if size != bytes {
		return fmt.Errorf("QEMU answered OK, but the disk has %d bytes, not %d: a block device must be grown on the host first", size, bytes)
	}
	return nil
}

// virtualSize returns the bytes of a disk as its device sees them.
func (vm *VM) virtualSize(ctx context.Context, id string) (uint64, error) {
	nodes, err := vm.blockNodes(ctx)
	if err != nil {
		return 0, err
	}
	size, ok := nodes[RawNode(id)]
	if !ok {
		return 0, fmt.Errorf("QEMU has no block node %s: attaching or detaching it has stopped half way, detach it", RawNode(id))
	}
	return size, nil
}

// blockNodes returns the virtual size of each block node, by its name.
func (vm *VM) blockNodes(ctx context.Context) (map[string]uint64, error) {
	nodes, err := askNodes(ctx, vm.qmp.Execute)
	return nodes, vm.explained(ctx, err)
}
