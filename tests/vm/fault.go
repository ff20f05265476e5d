package vm

import (
	"context"
	"fmt"

	"github.com/directvol/directvol/host/qemu"
)

// faultNode returns the name of the block node that fails a volume's reads or writes.
func (v *Volume) faultNode() string { return "fault-" + v.DiskID() }

// errnoEIO is EIO, as QEMU's blkdebug expects it.
const errnoEIO = 5

// BreakWrites makes every write of the volume's disk fail with EIO from now on.
func (v *Volume) BreakWrites(ctx context.Context) error { return v.breakIO(ctx, "write") }

// BreakReads makes every read of the volume's disk fail with EIO from now on.
func (v *Volume) BreakReads(ctx context.Context) error { return v.breakIO(ctx, "read") }

// BreakNextWrite makes only the next write to a part of the disk fail with EIO: the sector that has
// the byte at offset. Whatever else is written, such as the journal, is written.
func (v *Volume) BreakNextWrite(ctx context.Context, offset uint64) error {
	return v.breakOn(ctx, map[string]any{"event": "none", "iotype": "write", "errno": errnoEIO, "once": true, "sector": offset / sectorBytes})
}

// BreakWritesAt makes every write to the sector that has the byte at offset fail with EIO from now
// on. The rest of the disk is whole.
func (v *Volume) BreakWritesAt(ctx context.Context, offset uint64) error {
	return v.breakOn(ctx, map[string]any{"event": "none", "iotype": "write", "errno": errnoEIO, "sector": offset / sectorBytes})
}

// BreakReadsAt makes every read of the sector that has the byte at offset fail with EIO from now
// on. The rest of the disk is whole.
func (v *Volume) BreakReadsAt(ctx context.Context, offset uint64) error {
	return v.breakOn(ctx, map[string]any{"event": "none", "iotype": "read", "errno": errnoEIO, "sector": offset / sectorBytes})
}

// sectorBytes is QEMU's unit of positions on a disk (BDRV_SECTOR_SIZE).
const sectorBytes = 512

func (v *Volume) breakIO(ctx context.Context, iotype string) error {
	return v.breakOn(ctx, map[string]any{"event": "none", "iotype": iotype, "errno": errnoEIO})
}

// breakOn puts a blkdebug node between the disk's raw node and its file (qapi/block-core.json).
// QEMU then makes the fault, and the guest's kernel meets it.
func (v *Volume) breakOn(ctx context.Context, inject map[string]any) error {
	return v.insert(ctx, map[string]any{
		"driver": "blkdebug", "node-name": v.faultNode(), "image": qemu.FileNode(v.DiskID()), "inject-error": []map[string]any{inject},
	})
}

// insert puts a node below the disk's raw node, while the disk is in use.
func (v *Volume) insert(ctx context.Context, node map[string]any) error {
	if err := v.guest.VM().QMP().Execute(ctx, "blockdev-add", node, nil); err != nil {
		return fmt.Errorf("put a fault below volume %s: %w", v.ID, err)
	}
	v.faulty = true
	return v.guest.VM().ReplaceFileNode(ctx, v.DiskID(), v.faultNode())
}

// Heal removes the fault, if there is one. A hanging disk answers first.
func (v *Volume) Heal(ctx context.Context) error {
	if !v.faulty {
		return nil
	}
	if v.server != nil || v.stopped != nil {
		if err := v.Answer(); err != nil {
			return fmt.Errorf("repair volume %s: %w", v.ID, err)
		}
	}
	if err := v.guest.VM().ReplaceFileNode(ctx, v.DiskID(), qemu.FileNode(v.DiskID())); err != nil {
		return err
	}
	err := v.guest.VM().QMP().Execute(ctx, "blockdev-del", map[string]any{"node-name": v.faultNode()}, nil)
	if err == nil && v.throttled {
		err = v.guest.VM().QMP().Execute(ctx, "object-del", map[string]any{"id": v.throttle()}, nil)
		v.throttled = err != nil
	}
	if err != nil {
		return fmt.Errorf("repair volume %s: %w", v.ID, err)
	}
	if v.server != nil {
		v.server.end()
		v.server = nil
	}
	v.faulty = false
	if v.stopped != nil {
		err = v.stopped.Close()
		v.stopped = nil
	}
	return err
}
