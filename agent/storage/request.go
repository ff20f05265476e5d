package storage

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/directvol/directvol/agent/contract"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/protocols/agentpb"
)

// request is a Storage that was parsed and checked.
type request struct {
	driver     *driver
	source     string
	fstype     string
	options    mount.Options
	taken      uintptr // flags that an update clears
	mountPoint string
	shared     bool
	serial     string // the disk's serial that the host has promised, or ""
}

// isHostOnly reports whether an option means something only to mount(8), fstab or the kubelet, or
// is the default. CSI drivers pass such options on, and a filesystem would refuse them.
func isHostOnly(option string) bool { return slices.Contains(contract.HostOptions, option) }

func parse(s *agentpb.Storage) (request, error) {
	refuse := func(format string, args ...any) (request, error) {
		return request{}, errkind.New(errkind.InvalidArgument, "storage %.200q: "+format, append([]any{s.MountPoint}, args...)...)
	}
	if s == nil {
		return request{}, errkind.New(errkind.InvalidArgument, "storage: empty message")
	}
	driver := driverOf(s.Driver)
	if driver == nil {
		return refuse("unknown driver %.40q, this agent has %v", s.Driver, Drivers())
	}
	if len(s.Source) > mount.PathBytes || strings.ContainsRune(s.Source, 0) || !utf8.ValidString(s.Source) {
		return refuse("source %.40q: at most %d bytes of UTF-8, none of them 0", s.Source, mount.PathBytes)
	}
	clean := filepath.Clean(s.MountPoint)
	if !mount.IsPoint(clean) {
		return refuse("the mount point must be an absolute path below /")
	}
	if err := contract.Check(s); err != nil {
		return request{}, errkind.New(errkind.Of(err), "storage %.200q: %w", s.MountPoint, err)
	}
	serial, others, err := promisedSerial(driver, s.DriverOptions)
	if err != nil {
		return refuse("driver_options: %w", err)
	}
	if len(others) > 0 {
		return request{}, errkind.New(errkind.Unimplemented, "storage %.200q: driver_options %.80q: this agent has none but %s of a disk", s.MountPoint, others, serialOption)
	}
	options, taken, err := mount.ParseOptions(s.Options, isHostOnly)
	if err != nil {
		return refuse("%w", err)
	}
	r := request{driver: driver, source: s.Source, fstype: s.Fstype, options: options, taken: taken, mountPoint: clean, shared: s.Shared, serial: serial}
	if err := driver.check(r); err != nil {
		return request{}, errkind.New(errkind.Of(err), "storage %.200q: %w", s.MountPoint, err)
	}
	return r, nil
}

// serialOption is the option in a Storage's driver_options that names the intended disk. Calls wait
// until the device at the source has this serial.
const serialOption = "serial="

// serialBytes is the longest serial of any bus: an NVMe disk has 20 bytes, a SCSI disk 252.
const serialBytes = 252

// promisedSerial extracts the serial from a device's driver_options, and returns the other options.
func promisedSerial(driver *driver, all []string) (serial string, others []string, err error) {
	for _, option := range all {
		text, ok := strings.CutPrefix(option, serialOption)
		switch {
		case !ok || !driver.device:
			others = append(others, option)
		case serial != "":
			return "", nil, fmt.Errorf("%s is there twice", serialOption)
		case text == "" || len(text) > serialBytes || strings.TrimSpace(text) != text || strings.ContainsRune(text, 0):
			return "", nil, fmt.Errorf("serial %.60q: want 1 to %d bytes, none of them 0, and no blanks around them", text, serialBytes)
		default:
			serial = text
		}
	}
	return serial, others, nil
}
