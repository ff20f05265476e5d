package qemu

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/directvol/directvol/host/qmp"
)

// Disk is a disk for a VM.
type Disk struct {
	// ID names the disk in this VM: 1 to 25 letters, digits, '.', '_' and '-', the first a letter or digit.
	ID string
	// Path is its store on the host: a file or a block device, taken as it is, without a format. It is opened once, and belongs to
	// this VM until the disk is detached (package registry): a store that others have is refused with a *holders.InUseError.
	Path string
	// ReadOnly keeps guest and QEMU from writing. One store may be several disks if all are read-only.
	ReadOnly bool
	// Serial is what the guest sees as the disk's serial, of 20 bytes at most; empty for none.
	Serial string
}

// Attached is a disk that a VM has.
type Attached struct {
	Disk
	// PCIPath is where the guest finds it, as protocols/pcipath writes it.
	PCIPath string
	// Device is the name of its device in QEMU, as QMP events have it. No other disk of the VM has or had it.
	Device string
	// Gone is closed when the VM has the disk no more, whoever took it.
	Gone <-chan struct{}
}

// FileNode returns the name of the block node that opens a disk's store.
func FileNode(id string) string { return "file-" + id }

// RawNode returns the name of the block node that a disk's device uses, above FileNode.
func RawNode(id string) string { return "drive-" + id }

// maxSerial is VIRTIO_BLK_ID_BYTES of <linux/virtio_blk.h>.
const maxSerial = 20

// diskID leaves room for the prefix of a block node's name, which has 31 bytes at most.
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

// fileNode opens the store by a name: setName, or its path for who starts the VM by hand.
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

// geometry is what QEMU says of every disk of 8 GB or more, and nobody uses. Of a disk without one QEMU reads the boot sector to
// guess it (hd_geometry_guess), in its main loop: a store that hangs then stops the whole VM.
var geometry = struct{ cylinders, heads, sectors int }{16383, 16, 63}

// deviceOptions returns those of the disk's device. A guest has some two hundred interrupt vectors, and a disk with MSI-X takes three: it gets
// none, and shares a line. An I/O error is the guest's to handle: the default for a full store stops the VM, with all its disks.
func (d *disk) deviceOptions() deviceOptions {
	return deviceOptions{
		Driver: "virtio-blk-pci", ID: d.device(), Bus: d.slot.bus(), Address: d.slot.address(), Drive: RawNode(d.ID), Serial: d.Serial,
		Vectors: 0, DisableLegacy: "on", WriteError: "report", ReadError: "report",
		Cylinders: geometry.cylinders, Heads: geometry.heads, Sectors: geometry.sectors,
	}
}

// Disk returns a disk that the VM has: a boot disk, or one attached and not detached since.
func (vm *VM) Disk(id string) (Attached, bool) {
	d := vm.disks.find(id)
	if d == nil {
		return Attached{}, false
	}
	return d.attached(), true
}

// AttachDisk gives the running VM a disk and returns where its guest will find it; the guest may need a moment, and is not waited
// for. The same disk again, with the same Disk, stays as it is, and an attach that was cut off is taken up; any other of an id or a
// store that the VM has, and one that has left or is leaving, is refused until it was detached (ErrAttached). What fails is undone;
// where that fails too, or ctx is over, the disk keeps its slot, and AttachDisk goes on or DetachDisk takes up the undoing.
func (vm *VM) AttachDisk(ctx context.Context, want Disk) (Attached, error) {
	d, err := vm.takeUp(ctx, want)
	if err == nil && d == nil {
		if err = vm.awaitRequests(ctx); err != nil { // or there would be something to undo
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

// takeUp returns a disk, locked, that is there, or whose attach was cut off; nil where it cannot be had so. It is refused where its
// path leads to another file by now. A disk that was attached by halves and has left is undone: nobody was told of its place.
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

// plug adds a disk's nodes and its device; again where some of it may be there. Nodes may come at any time, as the guest does not
// see them.
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

// removeNodes removes a disk's block nodes, or what is there of them, and takes the store from QEMU. A store that may hang stays: since
// it was tried last its guest may have taken its time to let go.
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
	// freeLimit is how long a device that is gone may keep its node, and freeAgain is when it is tried again.
	freeLimit = 5 * time.Second
	freeAgain = 10 * time.Millisecond
)

// errThere is the failure to take away what a device uses.
var errThere = errors.New("QEMU has its device")

// removeNode removes one block node. QEMU says of a device that it is gone before it has freed it, which it does when no thread
// looks at it any more (RCU) and without an event: until then its node is in use. So a refusal counts where the device is there, or
// where it stays.
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

// ReplaceFileNode puts another block node, by its name, under a disk's raw node, while the disk is in use; FileNode(id) puts things
// back. It is how a test makes a disk fail: the other node is a blkdebug over the file node.
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
