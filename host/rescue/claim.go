package rescue

import (
	"context"
	"fmt"
	"os"

	"github.com/directvol/directvol/host/registry"
)

// claim refuses a disk that is in use, and then keeps others from it. It searches for users first,
// because a search finds their names. Then it claims the disk, which is reliable for the uses that
// a claim excludes. Then it searches again for other users that came in between.
func (r *rescue) claim(ctx context.Context) (string, error) {
	if _, err := r.look(ctx, nil); err != nil {
		return "", err
	}
	if err := r.disk.Claim(); err != nil {
		return "", err
	}
	if err := r.takeBack(); err != nil {
		return "", err
	}
	// A previous user may have written the disk since it was identified.
	if err := r.whatItHolds(); err != nil {
		return "", err
	}
	return r.look(ctx, nil)
}

// look searches for users of the disk, and refuses the disk if there is one. Processes for which
// except returns true are allowed.
func (r *rescue) look(ctx context.Context, except func(pid int) bool) (string, error) {
	seen, err := r.disk.Settled(ctx, except)
	if err == nil {
		err = seen.Err(r.Disk)
	}
	if err != nil {
		return "", err
	}
	if r.report.Unseen = seen.Unseen; seen.Unseen > 0 {
		return fmt.Sprintf("the search is incomplete: %d processes of other users cannot be examined; run this as root to include them", seen.Unseen), nil
	}
	return "", nil
}

// handOver releases the disk, so that a VM can take it.
func (r *rescue) handOver() error {
	r.disk.Yield()
	r.unlock()
	return r.disk.Unlock()
}

// takeBack takes the disk back from a VM that has ended. Locks that are still held stay held.
func (r *rescue) takeBack() (err error) {
	if r.lock == nil {
		if r.lock, err = registry.Default().Lock(r.disk.File(), "directvol rescue"); err != nil {
			return err
		}
	}
	if err := r.disk.Take(); err != nil {
		return err
	}
	return r.disk.Lock()
}

// close releases the disk.
func (r *rescue) close() {
	r.disk.Close() // all writes are on the disk already
	r.unlock()
}

// unlock releases the lock on the disk as a store.
func (r *rescue) unlock() {
	if r.lock != nil {
		r.lock.Release()
		r.lock = nil
	}
}

// isOurs reports whether a process is this one, which has the VM's store open, or its child, like
// the VM's processes.
func isOurs(pid int) bool {
	if pid == os.Getpid() {
		return true
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	return parentIn(string(text)) == os.Getpid()
}
