//go:build long

package rescue

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/tests/cuts/logwrites"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tests/vm/vmtest"
)

// manyFiles is more than an xfs directory can hold inside its inode, so the directory gets a block.
const manyFiles = 48

// cutBehindDirectory makes an xfs, fills its root directory, grows it under the mount, makes
// directories in the new space, and syncs everything, all with a record. The cut falls after the
// write of the root directory's block: that block has reached the disk, and nothing else since the
// last flush. The log begins with the directory before the growth, so recovery finds a later
// version of the directory on the disk.
func cutBehindDirectory(t *testing.T) cut {
	t.Helper()
	ctx := vmtest.Within(t, vmtest.JobLimit)
	c := newCut(t, ctx)
	before := c.copied(t)
	record := filepath.Join(t.TempDir(), "record")
	g := vmtest.Boot(t, vm.Options{})
	defer g.Kill()
	vmtest.Must(t, g.Attach(ctx, c.Volume))
	awaitSize(t, ctx, g, diskBytes)
	vmtest.Must(t, g.Record(ctx, c.DiskID(), record))
	vmtest.Must(t, bareMount(t, ctx, g))
	c.fill(t, ctx, g, manyFiles)
	c.bytes = grownOnce[0]
	c.grow(t, ctx, g)
	c.fill(t, ctx, g, files)
	vmtest.Must(t, g.Remote.Unmount(ctx, mountPoint, 0))
	before.bytes, before.ledgers = c.bytes, c.ledgers
	before.replay(t, ctx, record)
	return before
}

// replay turns the volume, as it was before, into what the cut has left.
func (c cut) replay(t *testing.T, ctx context.Context, path string) {
	t.Helper()
	record, err := os.Open(path)
	vmtest.Must(t, err)
	defer record.Close()
	info, err := record.Stat()
	vmtest.Must(t, err)
	entries, err := logwrites.Read(record, info.Size())
	vmtest.Must(t, err)
	directory := firstOfDirectory(t, record, entries)
	image, err := os.OpenFile(c.Path, os.O_RDWR, 0)
	vmtest.Must(t, err)
	defer image.Close()
	vmtest.Must(t, image.Truncate(int64(c.bytes)))
	vmtest.Must(t, logwrites.Replay(image, int64(c.bytes), record, entries, logwrites.Point{At: directory.End, After: logwrites.None}))
	vmtest.Must(t, logwrites.Replay(image, int64(c.bytes), record, []logwrites.Entry{directory}, logwrites.Point{At: directory.End, After: logwrites.All}))
}

// firstOfDirectory returns the first write with a directory's block at its start, or at a multiple
// of the block size: struct xfs_dir3_blk_hdr, fs/xfs/libxfs/xfs_da_format.h.
func firstOfDirectory(t *testing.T, record *os.File, entries []logwrites.Entry) logwrites.Entry {
	t.Helper()
	const block = 4096
	magic := []byte("XDB3")
	for _, e := range entries {
		for at := int64(0); at < e.Bytes; at += block {
			found := make([]byte, len(magic))
			_, err := record.ReadAt(found, e.Data+at)
			vmtest.Must(t, err)
			if bytes.Equal(found, magic) {
				return e
			}
		}
	}
	t.Fatal("no directory's block was written")
	return logwrites.Entry{}
}
