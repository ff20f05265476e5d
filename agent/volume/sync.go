package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// syncLimit bounds how long Sync waits for a disk that completes no request. Sync's caller waits
// for 10 s or more, and no other call is served meanwhile.
const syncLimit = 2 * time.Second

// Sync makes every disk in the guest take all earlier writes, whoever has mounted it. It flushes
// each filesystem separately, so that the error names one that hangs, and then syncs those that no
// path leads to any more. However often Sync is called, one thread per volume waits for the disk.
// It waits for a slow disk until ctx ends.
func (t *Table) Sync(ctx context.Context) error {
	flushing, cancel := t.Patient(ctx, syncLimit)
	defer cancel()
	mounts, err := mount.Now()
	if err != nil {
		return err
	}
	var wait sync.WaitGroup
	paths := onePathEach(mounts)
	errs := make([]error, len(paths))
	for i, path := range paths {
		wait.Go(func() {
			defer func() {
				if p := recover(); p != nil { // no caller of this goroutine recovers
					errs[i] = fmt.Errorf("volume %s: panic: %v\n%s", path, p, debug.Stack())
				}
			}()
			errs[i] = t.Flush(flushing, path)
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	syncing, cancel := health.Patient(ctx, syncLimit, health.AnyDisk)
	defer cancel()
	return t.syncing.wait(syncing)
}

// SyncOne returns when the disk of the volume at path has taken all that was written before the
// call. Unlike Flush, it returns the filesystem's error and that of the disk. A frozen volume has
// nothing to write.
func (t *Table) SyncOne(ctx context.Context, path string) error {
	v, err := t.Lookup(path)
	if err != nil {
		return err
	}
	return unlessFrozen(v.inTime(ctx, func(context.Context) error {
		err := v.syncFS()
		if errkind.Of(err) == errkind.NotFound {
			return err
		}
		if err == nil && v.Device.Path != "" { // a filesystem with nothing to write sends the disk no request
			err = blockdev.Flush(v.Device.Path)
		}
		if err != nil {
			return errkind.New(errkind.Internal, "volume %s: not everything that was written has reached its disk: %w", v.Mountpoint, err)
		}
		return nil
	}))
}

// Patient is health.Patient for the disks of volumes that are being flushed, grown or unmounted.
// Their watches send these disks one read at most meanwhile, which prolongs the wait once.
func (t *Table) Patient(ctx context.Context, silence time.Duration) (context.Context, context.CancelFunc) {
	return health.Patient(ctx, silence, func(device uint64) bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, v := range t.volumes {
			if v.Device.Number == device && len(v.growing) > 0 {
				return true
			}
		}
		return false
	})
}

// onePathEach returns one path to each filesystem that has a block device and is visible somewhere.
func onePathEach(mounts *mount.List) (paths []string) {
	type device struct{ major, minor int }
	known := map[device]bool{}
	for _, m := range mounts.InSight() {
		if d := (device{m.Major, m.Minor}); mount.OnDisk(m) && !known[d] {
			known[d] = true
			paths = append(paths, m.Mountpoint)
		}
	}
	return paths
}

// syncFS is syncfs(2), unless the path leads elsewhere by now: then the error is NotFound. Its
// errors are reported to callers of fsync, too.
func (v *Volume) syncFS() error {
	root, err := v.openRoot()
	if err != nil {
		return err
	}
	defer root.Close()
	return os.NewSyscallError("syncfs "+v.Mountpoint, unix.Syncfs(int(root.Fd())))
}

// syncing runs sync(2), one at a time for all callers.
type syncing struct {
	mu    sync.Mutex
	ended chan struct{} // of the sync in progress
}

// wait returns when a sync that began after the call has ended.
func (s *syncing) wait(ctx context.Context) error {
	joined, ended := s.begin()
	if joined { // the sync may have begun before the last writes
		select {
		case <-ended:
			_, ended = s.begin()
		case <-ctx.Done():
		}
	}
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return errkind.New(errkind.DeadlineExceeded, "sync: a disk does not answer, and its mount is not visible to the agent: %w", context.Cause(ctx))
	}
}

// begin joins the sync in progress or starts one. ended is closed when that sync has ended.
func (s *syncing) begin() (joined bool, ended <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return true, s.ended
	}
	done := make(chan struct{})
	s.ended = done
	go func() {
		unix.Sync()
		s.mu.Lock()
		defer s.mu.Unlock()
		close(done)
		s.ended = nil
	}()
	return false, done
}
