package qemu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/directvol/directvol/host/registry"
	"github.com/directvol/directvol/host/trial"
)

var (
	// ErrAttached is the refusal of a disk that a VM has already, by its id or its store.
	ErrAttached = errors.New("already attached")
	// ErrNoDisk is the failure of a call that names a disk the VM does not have.
	ErrNoDisk = errors.New("the VM has no such disk")
)

// disk is one that the VM has, or is about to have or to lose.
type disk struct {
	Disk
	store *registry.Store
	// number is one that no other disk of the VM has or had. Its device has it in its name: QEMU says that a device is gone when it has
	// freed it, and the next device of a disk may be there by then. The set of descriptors by which QEMU has the store (add-fd) has it too.
	number int
	slot   slot
	// busy holds a token while one call changes the disk; what follows belongs to that call.
	busy   chan struct{}
	trials trial.Trials // of its store, which has no other ones
	// stuck is a look at the store that its caller gave up, closed when it has ended: the disk stays locked until then.
	stuck <-chan struct{}
	half  bool // an attach of it was cut off, or could not be undone
	// bytes is its size as QEMU has it: its store's when that was claimed, and since the last growth.
	bytes uint64

	doubt chan struct{}          // gets a token when the guest refuses, and it is open which request
	close func() <-chan struct{} // has the store closed, and returns what is closed when it has

	// plugged is set when QEMU has its device, and stays: a device that is not there any more has left.
	plugged atomic.Bool

	owned bool // its store is claimed; the table's mutex guards it

	mu    sync.Mutex    // guards what follows
	asked bool          // the guest was asked to let go of it, and may at any moment
	isOut bool          // gone is closed
	gone  chan struct{} // closed when the machine has its device no more
	requests
}

// isGone reports whether the device has left.
func (d *disk) isGone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.isOut
}

// whenGone returns a channel that is closed when the machine has the device no more.
func (d *disk) whenGone() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gone
}

// leaves notes that the device has left, and reports whether that is new, and whether nobody had asked for it.
func (d *disk) leaves() (left, byItself bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.isOut {
		return false, false
	}
	d.isOut = true
	close(d.gone)
	return true, !d.asked
}

// isBack notes that the device is there, whatever said that it had left.
func (d *disk) isBack() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.isOut {
		d.isOut, d.asked, d.gone = false, false, make(chan struct{})
	}
}

func (d *disk) unlock() {
	stuck := d.stuck
	if d.stuck = nil; stuck == nil {
		<-d.busy
		return
	}
	go func() {
		<-stuck
		<-d.busy
	}()
}

// within has look look at the store, which may take for ever, for no longer than ctx. However often that is tried, one thread waits
// for a store: until look has ended the disk stays locked.
func (d *disk) within(ctx context.Context, look func() error) error {
	answer, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		answer <- look()
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		d.stuck = ended
		return fmt.Errorf("its store %s has not answered: %w", d.Path, ctx.Err())
	}
}

// storeBytes returns the store's size.
func (d *disk) storeBytes(ctx context.Context) (uint64, error) {
	var found uint64
	err := d.within(ctx, func() (err error) {
		found, err = d.store.Bytes()
		return err
	})
	if err != nil {
		return 0, err
	}
	return found, nil
}

// device returns the name of the disk's device.
func (d *disk) device() string { return fmt.Sprintf("disk-%s-%d", d.ID, d.number) }

func (d *disk) attached() Attached {
	return Attached{Disk: d.Disk, PCIPath: d.slot.path().String(), Device: d.device(), Gone: d.whenGone()}
}

// diskTable is the disks of one VM.
type diskTable struct {
	bridges int
	stores  *registry.Stores
	owner   string // of the stores
	claim   func(store *registry.Store, owner string, readOnly bool) error
	mu      sync.Mutex
	numbers int // of disks so far
	disks   map[string]*disk
	ended   error           // why no disk comes any more, once QEMU has ended
	freed   map[slot]uint64 // the number of the release that freed a slot last
	freeing uint64          // releases so far
}

func newDiskTable(bridges int, stores *registry.Stores, owner string) *diskTable {
	return &diskTable{bridges: bridges, stores: stores, owner: owner, claim: (*registry.Store).Claim, disks: make(map[string]*disk), freed: make(map[slot]uint64)}
}

// reserve takes an id, a store and a slot for a disk, which comes back locked.
func (t *diskTable) reserve(want Disk) (*disk, error) {
	return t.add(want, func(taken map[slot]bool) (slot, error) { return freeSlot(t.bridges, taken, t.freed) })
}

// reserveIn is reserve for no longer than ctx.
func (t *diskTable) reserveIn(ctx context.Context, want Disk) (*disk, error) {
	return t.in(ctx, want, func() (*disk, error) { return t.reserve(want) })
}

// in has add add a disk, for no longer than ctx: opening a store may take for ever, and so may the look for who else has it. Until that
// ends the disk keeps its place, locked.
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

// undo gives back what a disk has that nobody got: nothing was written.
func (t *diskTable) undo(d *disk) {
	<-d.close()
	t.drop(d)
	d.unlock()
}

// addBoot takes the place of a boot disk, by its number.
func (t *diskTable) addBoot(ctx context.Context, number int, want Disk) error {
	d, err := t.in(ctx, want, func() (*disk, error) {
		return t.add(want, func(map[slot]bool) (slot, error) { return slot{0, firstBootSlot + number}, nil })
	})
	if err != nil {
		return fmt.Errorf("boot %w", err)
	}
	d.plugged.Store(true) // it comes with QEMU
	d.unlock()
	return nil
}

// all returns the disks, also those that come or go just now.
func (t *diskTable) all() []*disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.disks))
}

// plugged returns the disks whose devices QEMU has, or had.
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

// place enters a disk, which comes back locked. Its store is claimed afterwards, as opening one may take its time.
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
			return nil, fmt.Errorf("disk %s: %s is %w as disk %s: two writers would destroy it", want.ID, want.Path, ErrAttached, other.ID)
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

// owns notes that a disk's store is claimed, unless QEMU has ended meanwhile: nobody would let go of it then.
func (t *diskTable) owns(d *disk) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	d.owned = t.ended == nil
	return t.ended
}

// stillNamed makes sure that a disk's path leads to its store. The disk is locked.
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

// otherFile is the refusal of a disk whose path leads to another file than it did.
func otherFile(d *disk) error {
	return fmt.Errorf("disk %s: %w, with the file that %s was then, and another file has that name now: detach the disk first", d.ID, ErrAttached, d.Path)
}

// find returns a disk, nil where there is none.
func (t *diskTable) find(id string) *disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.disks[id]
}

// byDevice returns the disk of a device, nil where there is none.
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

// closing returns a function that has a store closed, once. What the kernel has of a block device is written then, to a disk that
// may not answer.
func closing(store *registry.Store) func() <-chan struct{} {
	return sync.OnceValue(func() <-chan struct{} {
		closed := make(chan struct{})
		go func() {
			store.Close()
			close(closed)
		}()
		return closed
	})
}

// release drops a disk that is gone, when its store has closed. Until then, whatever ctx says, it stays, and is released again. Its
// lock stays with the caller.
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

// hotplugged returns the ids of the disks that are not boot disks, in their order.
func (t *diskTable) hotplugged() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	ids := slices.Sorted(maps.Keys(t.disks))
	return slices.DeleteFunc(ids, func(id string) bool { return t.disks[id].slot.bridge == 0 })
}

// end lets go of all disks and their stores when QEMU has ended, and takes no more; why is what later calls fail with. A store
// whose disk does not answer may take for ever to close, and holds up no other: it is among those left after patience, and still
// closes when it can.
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

// refuse lets no disk in from now on, and returns those whose stores are claimed: one that is only just being claimed closes when it
// was (owns).
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

// allGone says of all disks that they are gone, when the VM's end is known: before, they would seem to have left by themselves.
func (t *diskTable) allGone() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, d := range t.disks {
		d.leaves()
	}
}

// bootDisks returns the boot disks in their order.
func (t *diskTable) bootDisks() []*disk {
	t.mu.Lock()
	defer t.mu.Unlock()
	disks := slices.DeleteFunc(slices.Collect(maps.Values(t.disks)), func(d *disk) bool { return d.slot.bridge != 0 })
	slices.SortFunc(disks, func(a, b *disk) int { return a.slot.device - b.slot.device })
	return disks
}
