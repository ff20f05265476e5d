package volume

import (
	"context"
	"fmt"
	"time"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
)

// Flush makes the disk of the volume at path take all earlier writes, and waits until the disk
// answers. If ctx ends first, or the disk hangs for hungLimit, the error names the disk. However
// often Flush is called, one thread per volume waits for the disk. A flush that began after a call
// serves that call too. Other failures are reported to callers of fsync.
func (t *Table) Flush(ctx context.Context, path string) error {
	return t.flush(ctx, path, func(*Volume) {})
}

// Settle is Flush before an unmount. It also makes the filesystem write its log back, because a
// write that fails in the unmount itself may lose the log (filesystem.Type.Checkpoint). A write
// that has failed does not keep the volume from being unmounted: the log has what was to be
// written. failed is called with its error before Settle returns.
func (t *Table) Settle(ctx context.Context, path string, failed func(error)) error {
	return t.flush(ctx, path, func(v *Volume) {
		if err := v.checkpoint(); err != nil && errkind.Of(err) != errkind.NotFound { // unmounted, or covered
			failed(err)
		}
	})
}

// checkpoint is filesystem.Type.Checkpoint of the volume.
func (v *Volume) checkpoint() error {
	fstype, ok := filesystem.Lookup(v.FSType)
	if !ok {
		return nil
	}
	root, err := v.openRoot()
	if err != nil {
		return err
	}
	defer root.Close()
	return fstype.Checkpoint(root)
}

// flush implements Flush. It runs then after the flush, under the volume's lock.
func (t *Table) flush(ctx context.Context, path string, then func(*Volume)) error {
	v, err := t.Lookup(path)
	if kind := errkind.Of(err); err != nil && (kind == errkind.NotFound || kind == errkind.InvalidArgument) {
		return nil // not mounted any more
	} else if err != nil {
		return err
	}
	v.mu.Lock()
	before := v.flushes
	v.mu.Unlock()
	if v.watch != nil {
		var cancel context.CancelFunc
		ctx, cancel = whileAnswering(ctx, v.watch.Hangs)
		defer cancel()
	}
	return unlessFrozen(v.inTime(ctx, func(context.Context) error {
		v.flush(before)
		then(v)
		return nil
	}))
}

// hungLimit bounds how long a flush waits for a disk that hangs according to the kernel's counters.
// A caller with a longer deadline gets its error earlier.
const hungLimit = 8 * time.Second

var errHangs = fmt.Errorf("it has hung for %v or more", hungLimit)

// whileAnswering returns a context that ends when ctx does, or when a disk has hung for hungLimit.
func whileAnswering(ctx context.Context, hangs func() bool) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		again := time.NewTicker(time.Second)
		defer again.Stop()
		for since := time.Now(); time.Since(since) < hungLimit; {
			select {
			case <-again.C:
			case <-ctx.Done():
				return
			}
			if !hangs() {
				since = time.Now()
			}
		}
		cancel(errHangs)
	}()
	return ctx, func() { cancel(nil) }
}

// flush implements Flush, unless a flush with a number above before has ended. The caller has
// locked the volume.
func (v *Volume) flush(before uint64) {
	v.mu.Lock()
	ended := v.flushed > before
	if !ended {
		v.flushes++
	}
	number := v.flushes
	v.mu.Unlock()
	if ended {
		return
	}
	_ = v.syncFS()
	if v.Device.Path != "" { // a filesystem with nothing to write sends the disk no request
		_ = blockdev.Ask(v.Device.Path)
		_ = blockdev.Flush(v.Device.Path)
	}
	v.mu.Lock()
	v.flushed = number
	v.mu.Unlock()
}
