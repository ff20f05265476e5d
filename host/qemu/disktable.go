package qemu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/directvol/directvol/host/registry"
)

var (
	// ErrAttached is the refusal to attach a disk whose id or store the VM already has.
	ErrAttached = errors.New("already attached")
	// ErrNoDisk is the failure of a call that names a disk the VM does not have.
	ErrNoDisk = errors.New("the VM has no such disk")
)

// diskTable holds the disks of one VM.
type diskTable struct {
	bridges int
	stores  *registry.Stores
	owner   string // claims the stores
	claim   func(store *registry.Store, owner string, readOnly bool) error
	mu      sync.Mutex
	numbers int // of disks so far
	disks   map[string]*disk
	ended   error           // why no disk is accepted any more, once QEMU has ended
	freed   map[slot]uint64 // the number of the release that last freed the slot
	freeing uint64          // releases so far
}

func newDiskTable(bridges int, stores *registry.Stores, owner string) *diskTable {
	return &diskTable{bridges: bridges, stores: stores, owner: owner, claim: (*registry.Store).Claim, disks: make(map[string]*disk), freed: make(map[slot]uint64)}
}

// reserve reserves an id, a store and a slot, and returns the disk locked.
func (t *diskTable) reserve(want Disk) (*disk, error) {
	return t.add(want, func(taken map[slot]bool) (slot, error) { return freeSlot(t.bridges, taken, t.freed) })
}

// reserveIn is reserve, limited by ctx.
func (t *diskTable) reserveIn(ctx context.Context, want Disk) (*disk, error) {
	return t.in(ctx, want, func() (*disk, error) { return t.reserve(want) })
}

// in calls add, which adds a disk, and waits for it until ctx ends: opening a store, or looking for
// its other users, may never return. Until add returns, the disk keeps its place and stays locked.
func (t *diskTable) in(ctx context.Context, want Disk, add func() (*disk, error)) (*disk, error) {
	type answer struct {
		*disk
		error
	}
	added := make(chan answer)
	go func() {
		d, err := add()
		select {
		case added <- answer{d, err}:
		case <-ctx.Done():
			if err == nil {
				t.undo(d)
			}
		}
	}()
	select {
	case a := <-added:
		return a.disk, a.error
	case <-ctx.Done():
		return nil, fmt.Errorf("disk %s: its store %s has not opened, its disk may not answer: %w", want.ID, want.Path, ctx.Err())
	}
}

// undo gives back the store and slot of a disk that no caller received. Nothing was written to the
// store.
func (t *diskTable) undo(d *disk) {
	<-d.close()
	t.drop(d)
	d.unlock()
}

// addBoot adds the boot disk with the given number, in that number's slot.
func (t *diskTable) addBoot(ctx context.Context, number int, want Disk) error {
	d, err := t.in(ctx, want, func() (*disk, error) {
		return t.add(want, func(map[slot]bool) (slot, error) { return slot{0, firstBootSlot + number}, nil })
	})
	if err != nil {
		return fmt.Errorf("boot %w", err)
	}
	d.plugged.Store(true) // QEMU starts with this device
	d.unlock()
	return nil
}

// all returns all disks, including those that are being attached or detached.
func (t *diskTable) all() []*disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.disks))
}

// plugged returns the disks whose devices QEMU has, or once had.
func (t *diskTable) plugged() (all []*disk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range t.disks {
		if d.plugged.Load() {
			all = append(all, d)
		}
	}
	return all
}

func (t *diskTable) add(want Disk, choose func(taken map[slot]bool) (slot, error)) (*disk, error) {
	if err := want.check(); err != nil {
		return nil, err
	}
	store, err := t.stores.Find(want.Path)
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", want.ID, err)
	}
	d, err := t.place(want, store, choose)
	if err != nil {
		store.Close()
		return nil, err
	}
	if err = t.claim(store, t.owner, want.ReadOnly); err == nil {
		err = t.owns(d)
	}
	if err == nil {
		d.bytes, err = store.Bytes()
	}
	if err != nil {
		t.undo(d)
		return nil, fmt.Errorf("disk %s: %w", want.ID, err)
	}
	return d, nil
}

// place enters a disk in the table and returns it locked. The store is claimed afterwards, because
// opening it may take long.
func (t *diskTable) place(want Disk, store *registry.Store, choose func(taken map[slot]bool) (slot, error)) (*disk, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended != nil {
		return nil, fmt.Errorf("disk %s: %w", want.ID, t.ended)
	}
	taken := make(map[slot]bool)
	for _, other := range t.disks {
		taken[other.slot] = true
		if other.ID == want.ID && other.Path == want.Path && !other.store.Same(store) {
			return nil, otherFile(other)
		}
		if other.ID == want.ID {
			return nil, fmt.Errorf("disk %s: %w, it is %s: detach it first or use another id", want.ID, ErrAttached, other.Path)
		}
		if other.store.Same(store) && !(other.ReadOnly && want.ReadOnly) {
			return nil, fmt.Errorf("disk %s: %s is %w as disk %s: two writers would corrupt it", want.ID, want.Path, ErrAttached, other.ID)
		}
	}
	place, err := choose(taken)
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", want.ID, err)
	}
	t.numbers++
	d := &disk{
		Disk: want, store: store, number: t.numbers, slot: place, busy: make(chan struct{}, 1), gone: make(chan struct{}),
		doubt: make(chan struct{}, 1), close: closing(store), requests: requests{refused: make(chan struct{})},
	}
	d.busy <- struct{}{}
	t.disks[d.ID] = d
	return d, nil
}

// owns records that a disk's store is claimed. It fails if QEMU has ended meanwhile, because
// nothing would release the store then.
func (t *diskTable) owns(d *disk) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	d.owned = t.ended == nil
	return t.ended
}

// stillNamed checks that a disk's path still leads to its store. The disk must be locked.
func (t *diskTable) stillNamed(ctx context.Context, d *disk) error {
	return d.within(ctx, func() error { return t.isNamed(d) })
}

func (t *diskTable) isNamed(d *disk) error {
	now, err := t.stores.Find(d.Path)
	if err != nil {
		return fmt.Errorf("disk %s: %w", d.ID, err)
	}
	defer now.Close()
	if !now.Same(d.store) {
		return otherFile(d)
	}
	return nil
}

// otherFile returns the refusal of a disk whose path now leads to another file than when it was
// attached.
func otherFile(d *disk) error {
	return fmt.Errorf("disk %s: %w, but %s is another file now: detach the disk first", d.ID, ErrAttached, d.Path)
}

// find returns the disk with the id, or nil.
func (t *diskTable) find(id string) *disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.disks[id]
}

// byDevice returns the disk that has the device, or nil.
func (t *diskTable) byDevice(device string) *disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range t.disks {
		if d.device() == device {
			return d
		}
	}
	return nil
}

// acquire waits for the disk's lock and returns the disk locked.
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
		d.unlock() // the disk was detached meanwhile; another with its id may exist
	}
}

// release waits until a disk's store has closed, and removes the disk from the table. If ctx ends
// first, the disk stays in the table and can be released again. The caller keeps the disk's lock.
func (t *diskTable) release(ctx context.Context, d *disk) error {
	select {
	case <-d.close():
		t.drop(d)
		return nil
	case <-ctx.Done():
		return fmt.Errorf("its store has not closed, its disk may not answer: %w", ctx.Err())
	}
}

func (t *diskTable) drop(d *disk) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.disks, d.ID)
	t.freeing++
	t.freed[d.slot] = t.freeing
}

// hotplugged returns the sorted ids of the disks that are not boot disks.
func (t *diskTable) hotplugged() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	ids := slices.Sorted(maps.Keys(t.disks))
	return slices.DeleteFunc(ids, func(id string) bool { return t.disks[id].slot.bridge == 0 })
}

// end closes the stores of all disks after QEMU has ended. It accepts no disks any more; later
// calls fail with why. A store whose disk does not answer may never close, but does not delay the
// others: after patience, end returns it in left, and it still closes when it can.
func (t *diskTable) end(why error, patience time.Duration) (left []*disk) {
	owned := t.refuse(why)
	closed := make(chan *disk, len(owned))
	for _, d := range owned {
		go func() {
			<-d.close()
			closed <- d
		}()
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for range len(owned) {
		select {
		case d := <-closed:
			delete(owned, d.ID)
		case <-limit.C:
			return slices.Collect(maps.Values(owned))
		}
	}
	return nil
}

// refuse makes the table accept no further disks, and returns the disks whose stores are claimed. A
// store that is just being claimed is closed by its caller afterwards (see owns).
func (t *diskTable) refuse(why error) map[string]*disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = why
	owned := make(map[string]*disk)
	for id, d := range t.disks {
		if d.owned {
			owned[id] = d
		}
	}
	return owned
}

// allGone records all disks as gone. Call it only when it is known how the VM ended: before, the
// log would say that the disks left by themselves.
func (t *diskTable) allGone() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range t.disks {
		d.leaves()
	}
}

// bootDisks returns the boot disks in the order of their slots.
func (t *diskTable) bootDisks() []*disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	disks := slices.DeleteFunc(slices.Collect(maps.Values(t.disks)), func(d *disk) bool { return d.slot.bridge != 0 })
	slices.SortFunc(disks, func(a, b *disk) int { return a.slot.device - b.slot.device })
	return disks
}
