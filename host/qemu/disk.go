package qemu

import (
	"context"
	"fmt"
	"regexp"
	"sync"
	"sync/atomic"

	"github.com/directvol/directvol/host/registry"
	"github.com/directvol/directvol/host/trial"
)

// Disk describes a disk for a VM.
type Disk struct {
	// ID names the disk in this VM: 1 to 25 letters, digits, '.', '_' and '-'; the first is a
	// letter or digit.
	ID string
	// Path is the disk's store on the host: a file or a block device, used as it is, without an
	// image format. The store is opened once, and belongs to this VM until the disk is detached
	// (package registry). A store in use elsewhere is refused with a *holders.InUseError.
	Path string
	// ReadOnly keeps the guest and QEMU from writing. One store may back several disks if all are
	// read-only.
	ReadOnly bool
	// Serial is the disk's serial number in the guest, at most 20 bytes; empty for none.
	Serial string
}

// Attached is a disk that a VM has, with its place in the guest.
type Attached struct {
	Disk
	// PCIPath is the disk's PCI path in the guest, in the notation of protocols/pcipath.
	PCIPath string
	// Device is the name of the disk's device in QEMU, as in QMP events. No other disk of the VM
	// ever has the same name.
	Device string
	// Gone is closed when the VM no longer has the disk, whether or not it was detached.
	Gone <-chan struct{}
}

// FileNode returns the name of the block node that opens a disk's store.
func FileNode(id string) string { return "file-" + id }

// RawNode returns the name of the block node that a disk's device uses, above FileNode.
func RawNode(id string) string { return "drive-" + id }

// maxSerial is VIRTIO_BLK_ID_BYTES of <linux/virtio_blk.h>, in bytes.
const maxSerial = 20

// diskID limits an id so that a block node's name, prefix included, has at most 31 bytes.
var diskID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,24}$`)

func (d Disk) check() error {
	switch {
	case !diskID.MatchString(d.ID):
		return fmt.Errorf("disk id %.60q: want 1 to 25 letters, digits, '.', '_' and '-', the first a letter or digit", d.ID)
	case len(d.Serial) > maxSerial:
		return fmt.Errorf("disk %s: serial %.60q has %d bytes: a virtio disk's has %d at most", d.ID, d.Serial, len(d.Serial), maxSerial)
	}
	return nil
}

// disk is a disk that the VM has, or that is being attached or detached.
type disk struct {
	Disk
	store *registry.Store
	// number is unique among all disks that the VM has ever had. The device's name contains it,
	// because QEMU reports a device as gone only after freeing it, and a disk's next device may
	// exist by then. The set of descriptors through which QEMU has the store (add-fd) has the same
	// number.
	number int
	slot   slot
	// busy holds a token while a call changes the disk. The fields below, through bytes, belong to
	// that call.
	busy   chan struct{}
	trials trial.Trials // trials of this disk's store; nobody else makes any
	// stuck is closed when an abandoned access to the store has ended. The disk stays locked until
	// then.
	stuck <-chan struct{}
	half  bool // an attach was interrupted, or could not be undone
	// bytes is the size that QEMU knows: the store's size when the store was claimed, or after the
	// last growth.
	bytes uint64

	doubt chan struct{}          // receives a token when the guest refuses and it is unknown which request the refusal answers
	close func() <-chan struct{} // starts closing the store; the channel is closed when the store is

	// plugged is set when QEMU has the disk's device, and never cleared: a device that is not there
	// any more has left.
	plugged atomic.Bool

	owned bool // the store is claimed; the table's mutex guards this field

	mu    sync.Mutex    // guards the fields below
	asked bool          // the guest was asked to release the disk and may do so at any moment
	isOut bool          // the device has left: gone is closed
	gone  chan struct{} // closed when the VM no longer has the disk's device
	requests
}

// isGone reports whether the device has left.
func (d *disk) isGone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.isOut
}

// whenGone returns a channel that is closed when the VM no longer has the device.
func (d *disk) whenGone() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gone
}

// leaves records that the device has left. left is true if that was not recorded before, byItself
// if no call had asked for it.
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

// isBack records that the device is there after all, although it was reported as gone.
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

// within runs look, which accesses the store and may never return, and waits for it until ctx ends.
// The disk stays locked until look has returned, so that at most one thread waits for a store
// however often a caller tries.
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

// closing returns a function that starts closing a store, once. Closing a block device writes the
// kernel's cached data to the disk, which may not answer.
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

// Disk returns a disk that the VM has: a boot disk, or a disk that was attached and is not yet
// detached.
func (vm *VM) Disk(id string) (Attached, bool) {
	d := vm.disks.find(id)
	if d == nil {
		return Attached{}, false
	}
	return d.attached(), true
}

// ReplaceFileNode replaces the node below a disk's raw node by the named node, while the disk is in
// use. FileNode(id) restores the original. Tests use it to make a disk fail: the replacement is a
// blkdebug node above the file node.
func (vm *VM) ReplaceFileNode(ctx context.Context, id, node string) error {
	d, err := vm.disks.acquire(ctx, id)
	if err != nil {
		return fmt.Errorf("replace the file node of %w", err)
	}
	defer d.unlock()
	options := map[string][]nodeOptions{"options": {d.rawNode(node)}}
	if err := vm.change(ctx, d, "blockdev-reopen", options); err != nil {
		return fmt.Errorf("replace the file node of disk %s by %s: %w", id, node, err)
	}
	return nil
}
