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

// request is a Storage that has been found to make sense.
type request struct {
	driver     *driver
	source     string
	fstype     string
	options    mount.Options
	taken      uintptr // flags that it takes back: from a mount that is given new options
	mountPoint string
	shared     bool
	serial     string // of the disk, as the host has promised it; "" where it has not
}

// isHostOnly reports whether CSI drivers pass an option on that means something to
// mount(8), fstab or the kubelet, or is the default, but nothing to a filesystem, which
// would refuse it.
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

// serialOption is the one of a Storage's driver_options that names the disk which is
// meant: the device at the source is waited for until it has that serial.
const serialOption = "serial="

// serialBytes are more than any bus has: an NVMe disk has 20, a SCSI one 252.
const serialBytes = 252

// promisedSerial takes the serial from a device's driver_options, and returns the others.
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
