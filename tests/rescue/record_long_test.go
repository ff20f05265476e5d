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

// manyFiles are more than a directory of xfs holds within its inode: it gets a block.
const manyFiles = 48

// cutBehindDirectory makes an xfs, fills its root directory, grows it under the mount,
// makes directories in what was added, and has all of it written out. The cut, in a
// record of that, falls behind the write of the root directory's block: that one has
// reached the disk, and nothing else after the last flush. The log begins with the
// directory before the growth: recovery finds it on the disk as it was later.
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

// replay makes of the volume as it was what the cut has left.
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

// firstOfDirectory returns the first write that begins with a directory's block, or
// has one at a multiple of a block: struct xfs_dir3_blk_hdr, fs/xfs/libxfs/xfs_da_format.h.
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
