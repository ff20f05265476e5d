package qemu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

var (
	// ErrAttached is the refusal of a disk that a VM has already, by its id or its store.
	ErrAttached = errors.New("already attached")
	// ErrNoDisk is the failure of a call that names a disk the VM does not have.
	ErrNoDisk = errors.New("the VM has no such disk")
)

// store is what a disk's bytes are in. Two paths are one store if all but the path is equal.
type store struct {
	path   string // absolute
	driver string // of the block node: file or host_device
	dev    uint64 // the device it is, or is on
	inode  uint64 // of a file
}

// identify finds out what a path names.
func identify(path string) (store, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return store{}, err
	}
	var stat unix.Stat_t
	if err := unix.Stat(absolute, &stat); err != nil {
		return store{}, &os.PathError{Op: "stat", Path: absolute, Err: err}
	}
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return store{absolute, "file", stat.Dev, stat.Ino}, nil
	case unix.S_IFBLK:
		return store{absolute, "host_device", stat.Rdev, 0}, nil
	default:
		return store{}, fmt.Errorf("%s is neither a file nor a block device", absolute)
	}
}

// same reports whether two paths name one store.
func (s store) same(other store) bool {
	s.path = other.path
	return s == other
}

// disk is one that the VM has, or is about to have or to lose.
type disk struct {
	Disk
	store store
	slot  slot
	// busy holds a token while one call changes the disk; what follows belongs to that call.
	busy      chan struct{}
	unplugged bool // the guest was asked to let go of it
}

func (d *disk) unlock() { <-d.busy }

func (d *disk) attached() Attached { return Attached{Disk: d.Disk, PCIPath: d.slot.path().String()} }

// diskTable is the disks of one VM.
type diskTable struct {
	bridges int
	mu      sync.Mutex
	disks   map[string]*disk
}

func newDiskTable(bridges int) *diskTable {
	return &diskTable{bridges: bridges, disks: make(map[string]*disk)}
}

// reserve takes an id, a store and a slot for a disk, which comes back locked.
func (t *diskTable) reserve(want Disk) (*disk, error) {
	return t.add(want, func(taken map[slot]bool) (slot, error) { return freeSlot(t.bridges, taken) })
}

// addBoot takes the place of a boot disk, by its number.
func (t *diskTable) addBoot(number int, want Disk) error {
	d, err := t.add(want, func(map[slot]bool) (slot, error) { return slot{0, firstBootSlot + number}, nil })
	if err != nil {
		return fmt.Errorf("boot %w", err)
	}
	d.unlock()
	return nil
}

func (t *diskTable) add(want Disk, choose func(taken map[slot]bool) (slot, error)) (*disk, error) {
	if err := want.check(); err != nil {
		return nil, err
	}
	store, err := identify(want.Path)
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", want.ID, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	taken := make(map[slot]bool)
	for _, other := range t.disks {
		taken[other.slot] = true
		if other.ID == want.ID {
			return nil, fmt.Errorf("disk %s: %w, it is %s: detach it first or use another id", want.ID, ErrAttached, other.Path)
		}
		if other.store.same(store) && !(other.ReadOnly && want.ReadOnly) {
			return nil, fmt.Errorf("disk %s: %s is %w as disk %s: two writers would destroy it", want.ID, want.Path, ErrAttached, other.ID)
		}
	}
	place, err := choose(taken)
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", want.ID, err)
	}
	d := &disk{Disk: want, store: store, slot: place, busy: make(chan struct{}, 1)}
	d.busy <- struct{}{}
	t.disks[d.ID] = d
	return d, nil
}

// find returns a disk, nil where there is none.
func (t *diskTable) find(id string) *disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.disks[id]
}

// acquire returns a disk, locked.
func (t *diskTable) acquire(ctx context.Context, id string) (*disk, error) {
	for {
		d := t.find(id)
		if d == nil {
			return nil, fmt.Errorf("disk %.60q: %w", id, ErrNoDisk)
		}
		select {
		case d.busy <- struct{}{}:
		case <-ctx.Done():
			return nil, fmt.Errorf("disk %s: another call works on it: %w", id, ctx.Err())
		}
		if t.find(id) == d {
			return d, nil
		}
		d.unlock() // it was detached meanwhile, and may be there anew
	}
}

// release drops a disk that is gone. Its lock stays with the caller.
func (t *diskTable) release(d *disk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.disks, d.ID)
}

// bootDisks returns the boot disks in their order.
func (t *diskTable) bootDisks() []*disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	disks := slices.DeleteFunc(slices.Collect(maps.Values(t.disks)), func(d *disk) bool { return d.slot.bridge != 0 })
	slices.SortFunc(disks, func(a, b *disk) int { return a.slot.device - b.slot.device })
	return disks
}
