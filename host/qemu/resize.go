package qemu

import (
	"context"
	"errors"
	"fmt"
	"math"
)

// sectorSize is the unit of a block node's size.
const sectorSize = 512

// ErrShrink is the refusal to make a disk smaller. QEMU would obey and cut off data.
var ErrShrink = errors.New("disks do not shrink")

// ErrCutOff is the refusal to resize a disk whose store has become smaller than the disk. The guest
// reads zeroes beyond the store's end. The store's size is read right before block_resize: a store
// that is cut off between the two is not noticed, and QEMU fills it with zeroes.
var ErrCutOff = errors.New("its store has been cut off")

// ResizeDisk grows a disk to bytes, a multiple of 512, while the guest uses it. If the disk has
// that size already, ResizeDisk changes nothing. It grows a file; a block device must have been
// grown on the host before. It refuses a smaller size (ErrShrink), and any size if the store has
// been cut off (ErrCutOff).
//
// QEMU's OK proves nothing, so ResizeDisk reads the store's size afterwards and fails if it is not
// the requested one. It does not ask QEMU for sizes: each QEMU query that returns a size accesses
// all stores, in QEMU's main loop, and one store that hangs would stop the VM.
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
		return errors.New("its attach was interrupted: attach it again, or detach it")
	case bytes != d.bytes && d.ReadOnly:
		return errors.New("it is read-only")
	}
	// If another process has grown the file, QEMU does not know the new size, and block_resize
	// would cut the file.
	real, err := d.storeBytes(ctx)
	switch least := max(d.bytes, real); {
	case err != nil:
		return err
	case real < d.bytes:
		return fmt.Errorf("%w: it has %d bytes, and the disk %d: restore the store", ErrCutOff, real, d.bytes)
	case bytes == d.bytes:
		return nil
	case bytes < least:
		return fmt.Errorf("%w: it has %d bytes, %d were requested", ErrShrink, least, bytes)
	}
	arguments := struct {
		NodeName string `json:"node-name"`
		Size     uint64 `json:"size"`
	}{RawNode(d.ID), bytes}
	if err := vm.change(ctx, d, "block_resize", arguments); err != nil {
		return err
	}
	// The descriptor that QEMU got (add-fd) shares this process's open file. QEMU reads the size
	// anew when it resizes.
	if real, err = d.storeBytes(ctx); err != nil {
		return err
	}
	if real != bytes { // another process may have grown it: QEMU may not know, so d.bytes stays and a retry asks QEMU again
		return fmt.Errorf("QEMU answered OK, but the disk has %d bytes, not %d: a block device must be grown on the host first", real, bytes)
	}
	d.bytes = bytes
	return nil
}
