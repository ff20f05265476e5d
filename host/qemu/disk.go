package qemu

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/directvol/directvol/host/qmp"
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

// nodeOptions are the options of a block node (BlockdevOptions in qapi/block-core.json).
type nodeOptions struct {
	Driver   string `json:"driver"`
	NodeName string `json:"node-name"`
	Filename string `json:"filename,omitempty"`
	File     string `json:"file,omitempty"`
	ReadOnly bool   `json:"read-only"`
	Discard  string `json:"discard"`
}

// fileNode returns the node that opens the store by a file name: setName, or the store's path on a
// command line to be run by hand.
func (d *disk) fileNode(name string) nodeOptions {
	driver := "file"
	if d.store.Block() {
		driver = "host_device"
	}
	return nodeOptions{Driver: driver, NodeName: FileNode(d.ID), Filename: name, ReadOnly: d.ReadOnly, Discard: "unmap"}
}

func (d *disk) rawNode(file string) nodeOptions {
	return nodeOptions{Driver: "raw", NodeName: RawNode(d.ID), File: file, ReadOnly: d.ReadOnly, Discard: "unmap"}
}

// deviceOptions are the properties of a virtio-blk-pci device.
type deviceOptions struct {
	Driver        string `json:"driver"`
	ID            string `json:"id"`
	Bus           string `json:"bus"`
	Address       string `json:"addr"`
	Drive         string `json:"drive"`
	Serial        string `json:"serial,omitempty"`
	Vectors       int    `json:"vectors"`
	DisableLegacy string `json:"disable-legacy"`
	WriteError    string `json:"werror"`
	ReadError     string `json:"rerror"`
	Cylinders     int    `json:"cyls"`
	Heads         int    `json:"heads"`
	Sectors       int    `json:"secs"`
}

// geometry is the geometry that QEMU reports for every disk of 8 GB or more; no guest uses it. For
// a disk without a given geometry, QEMU's main loop reads the boot sector to guess it
// (hd_geometry_guess). If the store hangs, that would stop the whole VM.
var geometry = struct{ cylinders, heads, sectors int }{16383, 16, 63}

// deviceOptions returns the options of the disk's device. The device gets no MSI-X vectors and
// shares an interrupt line, because a guest has only about 200 vectors and a disk with MSI-X takes
// three. The guest handles I/O errors: by default a full store would stop the VM, with all its
// disks.
func (d *disk) deviceOptions() deviceOptions {
	return deviceOptions{
		Driver: "virtio-blk-pci", ID: d.device(), Bus: d.slot.bus(), Address: d.slot.address(), Drive: RawNode(d.ID), Serial: d.Serial,
		Vectors: 0, DisableLegacy: "on", WriteError: "report", ReadError: "report",
		Cylinders: geometry.cylinders, Heads: geometry.heads, Sectors: geometry.sectors,
	}
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

// AttachDisk attaches a disk to the running VM and returns its place in the guest. It does not wait
// until the guest sees the disk, which may take a moment.
//
// If the VM already has an identical Disk, AttachDisk succeeds without a change, and resumes an
// attach that was interrupted. Another Disk with the same id or the same store is refused until the
// old one is detached (ErrAttached), and so is a disk that has left or is leaving.
//
// A failed attach is undone. If undoing fails too, or if ctx has ended, the disk keeps its slot:
// calling AttachDisk again resumes the attach, and DetachDisk resumes undoing it.
func (vm *VM) AttachDisk(ctx context.Context, want Disk) (Attached, error) {
	d, err := vm.takeUp(ctx, want)
	if err == nil && d == nil {
		if err = vm.awaitRequests(ctx); err != nil { // checked first, so that nothing needs undoing
			return Attached{}, fmt.Errorf("attach disk %s (%s): %w", want.ID, want.Path, err)
		}
		d, err = vm.disks.reserveIn(ctx, want)
	}
	if err != nil {
		return Attached{}, fmt.Errorf("attach %w", err)
	}
	defer d.unlock()
	if d.plugged.Load() {
		return d.attached(), nil
	}
	again := d.half
	d.half = true
	if err = vm.plug(ctx, d, again); err == nil {
		d.half = false
		d.plugged.Store(true)
		return d.attached(), nil
	}
	err = fmt.Errorf("attach disk %s (%s): %w", d.ID, d.Path, err)
	if ctx.Err() != nil {
		return Attached{}, err
	}
	if left := vm.remove(ctx, d); left != nil {
		return Attached{}, fmt.Errorf("%w; what was done is not undone yet, detach the disk for that: %w", err, left)
	}
	return Attached{}, err
}

// takeUp returns, locked, a disk that the VM already has or whose attach was interrupted. It
// returns nil if there is no such disk, or if the VM's disk with this id differs from want, has
// left or is leaving. It refuses a disk whose path now leads to another file. A half-attached disk
// that has left is undone: no caller has learned its place.
func (vm *VM) takeUp(ctx context.Context, want Disk) (*disk, error) {
	d, err := vm.disks.acquire(ctx, want.ID)
	if errors.Is(err, ErrNoDisk) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	switch {
	case d.Disk != want || d.leaving() || d.isGone() && !d.half:
	case d.isGone():
		if err = vm.remove(ctx, d); err != nil {
			err = fmt.Errorf("disk %s: undo an attach that was cut off: %w", d.ID, err)
		}
	default:
		if err = vm.disks.stillNamed(ctx, d); err == nil {
			return d, nil
		}
	}
	d.unlock()
	return nil, err
}

// plug adds a disk's nodes and its device. again means that some of them may already exist. The
// nodes need no hotplug turn, because the guest does not see them.
func (vm *VM) plug(ctx context.Context, d *disk, again bool) error {
	var now state
	if again {
		var err error
		if now, err = vm.state(ctx); err != nil {
			return err
		}
	}
	if !now.nodes[FileNode(d.ID)] {
		if err := vm.addStore(ctx, d, again); err != nil {
			return err
		}
	}
	if !now.nodes[RawNode(d.ID)] {
		if err := vm.execute(ctx, "blockdev-add", d.rawNode(FileNode(d.ID)), nil); err != nil {
			return err
		}
	}
	done, err := vm.hotplug.take(ctx, d)
	if err != nil {
		return err
	}
	defer done()
	if again {
		if now, err = vm.state(ctx); err != nil || now.devices[d.device()] {
			return err
		}
	}
	return vm.execute(ctx, "device_add", d.deviceOptions(), nil)
}

// removeNodes removes those of the disk's block nodes that exist, and takes the store from QEMU. It
// first tries the store again and leaves everything in place if the store may hang: the guest may
// have needed long to release the disk since the last try.
func (vm *VM) removeNodes(ctx context.Context, d *disk) error {
	if err := vm.answers(ctx, d); err != nil {
		return err
	}
	for _, node := range []string{RawNode(d.ID), FileNode(d.ID)} {
		if err := vm.removeNode(ctx, d, node); err != nil {
			return err
		}
	}
	return vm.takeStore(ctx, d)
}

const (
	// freeLimit is how long a node may stay in use after its device is gone. freeAgain is the
	// interval between attempts to remove the node.
	freeLimit = 5 * time.Second
	freeAgain = 10 * time.Millisecond
)

// errThere means that a node cannot be removed because QEMU still has the device that uses it.
var errThere = errors.New("QEMU has its device")

// removeNode removes one block node. QEMU reports a device as gone before freeing it; QEMU frees it
// later (RCU), without an event, and the node is in use until then. So removeNode retries after a
// refusal, and fails only if the device is still there or the node stays in use for freeLimit.
func (vm *VM) removeNode(ctx context.Context, d *disk, node string) error {
	again := time.NewTicker(freeAgain)
	defer again.Stop()
	limit := time.After(freeLimit)
	for {
		err := vm.execute(ctx, "blockdev-del", map[string]string{"node-name": node}, nil)
		if answer := new(qmp.Error); !errors.As(err, &answer) && !errors.Is(err, ErrDiskHangs) {
			return err
		}
		// QEMU has no error class for "there is no such node".
		now, stateErr := vm.state(ctx)
		if stateErr != nil {
			return stateErr
		}
		if !now.nodes[node] {
			return nil
		}
		if errors.Is(err, ErrDiskHangs) {
			return err
		}
		if now.devices[d.device()] {
			return fmt.Errorf("%w: %w", errThere, err)
		}
		select {
		case <-again.C:
		case <-limit:
			return err
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, ctx.Err())
		}
	}
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
	if err := vm.execute(ctx, "blockdev-reopen", options, nil); err != nil {
		return fmt.Errorf("replace the file node of disk %s by %s: %w", id, node, err)
	}
	return nil
}
