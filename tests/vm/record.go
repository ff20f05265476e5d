package vm

import (
	"context"
	"fmt"
	"os"

	"github.com/directvol/directvol/host/qemu"
)

// errnoENOTSUP is ENOTSUP, as QEMU's blkdebug wants it.
const errnoENOTSUP = 95

// Record has every write and every flush of an attached disk written down in a
// file at path, from now on and as long as the VM lives: tests/cuts/logwrites
// reads it. The disk cannot be detached from then on.
//
//	drive-ID   raw, what the device uses
//	plain-ID   blkdebug: makes plain writes of "write zeroes"
//	record-ID  blklogwrites ── recorded-ID, the file at path
//	file-ID    the disk's store
//
// QEMU 7.2 chooses the place of a "write zeroes"' data only after it has written
// its entry, and another write may have taken it by then (block/blklogwrites.c,
// blk_log_writes_co_do_log). Where a driver answers ENOTSUP to it, QEMU writes
// the zeroes itself.
func (g *Guest) Record(ctx context.Context, id, path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	record, recorded, plain := "record-"+id, "recorded-"+id, "plain-"+id
	for _, node := range []map[string]any{
		// What it holds is read on this host, which does not crash: flushes would
		// only take time.
		{"driver": "file", "node-name": recorded, "filename": path, "cache": map[string]bool{"direct": false, "no-flush": true}},
		{"driver": "blklogwrites", "node-name": record, "file": qemu.FileNode(id), "log": recorded, "log-append": false, "log-sector-size": 512},
		{"driver": "blkdebug", "node-name": plain, "image": record,
			"inject-error": []map[string]any{{"event": "none", "iotype": "write-zeroes", "errno": errnoENOTSUP}}},
	} {
		if err := g.VM().QMP().Execute(ctx, "blockdev-add", node, nil); err != nil {
			return fmt.Errorf("record the writes of disk %s: %w", id, err)
		}
	}
	return g.VM().ReplaceFileNode(ctx, id, plain)
}
