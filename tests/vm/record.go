package vm

import (
	"context"
	"fmt"
	"os"

	"github.com/directvol/directvol/host/qemu"
)

// errnoENOTSUP is ENOTSUP, as QEMU's blkdebug expects it.
const errnoENOTSUP = 95

// Record records every write and every flush of an attached disk in a file at path, from now on
// until the VM ends. tests/cuts/logwrites reads the file. From now on the disk cannot be detached.
//
//	drive-ID   raw, the device's node
//	plain-ID   blkdebug: makes plain writes of "write zeroes"
//	record-ID  blklogwrites ── recorded-ID, the file at path
//	file-ID    the disk's store
//
// QEMU 7.2 chooses the place for the data of a "write zeroes" only after it has written the entry,
// and by then another write may have taken that place (block/blklogwrites.c,
// blk_log_writes_co_do_log). If a driver answers ENOTSUP to "write zeroes", QEMU writes the zeroes
// itself.
func (g *Guest) Record(ctx context.Context, id, path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	record, recorded, plain := "record-"+id, "recorded-"+id, "plain-"+id
	for _, node := range []map[string]any{
		// The record is read on this host, which does not crash, so flushes would only take time.
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
