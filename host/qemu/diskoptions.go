package qemu

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
