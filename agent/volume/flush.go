package volume

import (
	"context"
	"fmt"
	"time"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
)

// Flush has the disk of the volume at path take what was written so far, and answer, and
// waits until it has: where ctx ends before, or the disk hangs for hungLimit, the error says
// which disk. However often it is
// called, one thread waits for the disk, and whoever waits for a flush that began after his
// call needs no other one. What fails otherwise is for fsync's callers to know.
func (t *Table) Flush(ctx context.Context, path string) error {
	v, err := t.Lookup(path)
	if kind := errkind.Of(err); err != nil && (kind == errkind.NotFound || kind == errkind.InvalidArgument) {
		return nil // it is not mounted any more
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
	return v.inTime(ctx, func(context.Context) error {
		v.flush(before)
		return nil
	})
}

// hungLimit is how long a flush waits for a disk that hangs, by the kernel's counts: whoever
// has more time than that learns it early.
const hungLimit = 8 * time.Second

var errHangs = fmt.Errorf("it has hung for %v or more", hungLimit)

// whileAnswering returns a context that ends when ctx does, or when a disk has hung for
// hungLimit.
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

// flush does what Flush says, where no flush has ended that has a higher number than
// before. The volume is locked.
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
	syncFS(v.Mountpoint)
	if v.Device.Path != "" { // a filesystem that has nothing to write asks it nothing
		_ = blockdev.Ask(v.Device.Path)
		_ = blockdev.Flush(v.Device.Path)
	}
	v.mu.Lock()
	v.flushed = number
	v.mu.Unlock()
}
