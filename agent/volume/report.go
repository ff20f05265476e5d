package volume

import (
	"context"
	"reflect"
	"slices"
	"strings"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// Report is what is known of a volume without a request to its disk.
type Report struct {
	Path, FSType    string
	Devices         []string // paths of their nodes, such as /dev/vda; several of a btrfs
	DeviceBytes     uint64   // of the only device; 0 if it is not known
	FilesystemBytes uint64   // where the filesystem ends on its device; 0 if it is not known
	Owned, ReadOnly bool
	Conditions      []health.Condition // empty if the volume is healthy or was not looked at yet
	Growth          *Progress          // nil if no call grows the volume
	Frozen          bool               // by a lease

	number uint64 // counts up: the report with the larger number is the newer one
}

// same reports whether two reports differ in their numbers alone.
func (r Report) same(other Report) bool {
	r.number = other.number
	return reflect.DeepEqual(r, other)
}

// Progress is how far a growth is, in bytes from the beginning of the device to the filesystem's
// end.
type Progress struct{ From, Now, Goal uint64 }

// Report returns the volume's report. It reads memory and sysfs.
func (v *Volume) Report() Report {
	r := Report{Path: v.Mountpoint, FSType: v.FSType, Owned: v.Owned()}
	if v.Device.Number != 0 {
		r.DeviceBytes = blockdev.Bytes("/", v.Device.Number)
	}
	if v.watch != nil {
		v.watch.Asked()
		r.Conditions, _ = v.watch.Latest()
		r.FilesystemBytes = v.watch.FilesystemEnd()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	r.Devices, r.ReadOnly, r.Growth, r.Frozen = v.devices, v.readOnly, v.progress, v.frozen != nil
	r.FilesystemBytes = max(r.FilesystemBytes, v.end) // no filesystem shrinks here, and either may be older
	return r
}

// Report is Volume.Report of the volume at path. The report of a block device that the path names
// has no filesystem.
func (t *Table) Report(ctx context.Context, path string) (Report, error) {
	if r, err := rawAt(ctx, path); err != nil || r != nil {
		if err != nil {
			return Report{}, err
		}
		return r.report()
	}
	v, err := t.Lookup(path)
	if err != nil {
		return Report{}, err
	}
	return v.Report(), nil
}

// isReadOnly reports whether a mount, or its filesystem, takes no writes by its options.
func isReadOnly(m *mount.Info) bool {
	has := func(options string) bool { return slices.Contains(strings.Split(options, ","), "ro") }
	return has(m.Options) || has(m.VFSOptions)
}

// pathsOf returns the nodes of devices. It leaves out a device that is gone.
func pathsOf(devices []mount.Device) (paths []string) {
	for _, d := range devices {
		if device, err := blockdev.ByNumber(d.Number); err == nil {
			paths = append(paths, device.Path)
		}
	}
	return paths
}

// isVolume reports whether a mount is listed as a volume: the whole filesystem of a block device,
// and no bind of a directory in it.
func isVolume(m *mount.Info) bool {
	switch {
	case m.FSType == "btrfs": // its root may be a subvolume
		return strings.HasPrefix(m.Source, "/dev/")
	case m.Root != "/":
		return false
	}
	return m.Major != 0
}
