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
// answering OK proves nothing, so the store's size is read afterwards, and anything but what was asked for is an error. QEMU itself
// is not asked for sizes: each of its queries that says any looks at all stores, in its main loop, and one store that hangs stops the
// VM.
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
	switch {
	case d.half:
		return errors.New("attaching it has stopped half way: attach it again, or detach it")
	case bytes == d.bytes:
		return nil
	case d.ReadOnly:
		return errors.New("it is read-only")
	}
	// Somebody else may have grown a file, which QEMU then has not seen: block_resize would cut it.
	real, err := d.storeBytes(ctx)
	if err != nil {
		return err
	}
	if least := max(d.bytes, real); bytes < least {
		return fmt.Errorf("%w: it has %d bytes, %d were asked for", ErrShrink, least, bytes)
	}
	arguments := struct {
		NodeName string `json:"node-name"`
		Size     uint64 `json:"size"`
	}{RawNode(d.ID), bytes}
	if err := vm.execute(ctx, "block_resize", arguments, nil); err != nil {
		return err
	}
	// QEMU and this process have one open file (add-fd), and QEMU takes its size when it resizes.
	if real, err = d.storeBytes(ctx); err != nil {
		return err
	}
	if real != bytes { // whatever grew it: QEMU need not know, and is asked again
		return fmt.Errorf("QEMU answered OK, but the disk has %d bytes, not %d: a block device must be grown on the host first", real, bytes)
	}
	d.bytes = bytes
	return nil
}
