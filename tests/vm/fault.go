package vm

import (
	"context"
	"fmt"

	"github.com/directvol/directvol/host/qemu"
)

// faultNode is the block node that fails a volume's reads or writes.
func (v *Volume) faultNode() string { return "fault-" + v.ID }

// errnoEIO is EIO, as QEMU's blkdebug wants it.
const errnoEIO = 5

// BreakWrites makes every write of the volume's disk fail with EIO from now on.
func (v *Volume) BreakWrites(ctx context.Context) error { return v.breakIO(ctx, "write") }

// BreakReads does that to every read.
func (v *Volume) BreakReads(ctx context.Context) error { return v.breakIO(ctx, "read") }

// breakIO puts a blkdebug node between the disk's raw node and its file
// (qapi/block-core.json): a fault that QEMU makes and the guest's kernel meets.
func (v *Volume) breakIO(ctx context.Context, iotype string) error {
	err := v.guest.VM().QMP().Execute(ctx, "blockdev-add", map[string]any{
		"driver": "blkdebug", "node-name": v.faultNode(), "image": qemu.FileNode(v.ID),
		"inject-error": []map[string]any{{"event": "none", "iotype": iotype, "errno": errnoEIO}},
	}, nil)
	if err != nil {
		return fmt.Errorf("break the %ss of volume %s: %w", iotype, v.ID, err)
	}
	return v.guest.VM().ReplaceFileNode(ctx, v.ID, v.faultNode())
}

// Heal takes the fault away again.
func (v *Volume) Heal(ctx context.Context) error {
	if err := v.guest.VM().ReplaceFileNode(ctx, v.ID, qemu.FileNode(v.ID)); err != nil {
		return err
	}
	err := v.guest.VM().QMP().Execute(ctx, "blockdev-del", map[string]any{"node-name": v.faultNode()}, nil)
	if err != nil {
		return fmt.Errorf("heal volume %s: %w", v.ID, err)
	}
	return nil
}
