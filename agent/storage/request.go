package storage

import (
	"fmt"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/directvol/directvol/agent/contract"
	"github.com/directvol/directvol/agent/refusal"
	"github.com/directvol/directvol/protocols/agentpb"
)

const (
	pathBytes = 4095 // PATH_MAX, less its NUL
	dataBytes = 4095 // mount(2) takes a page of data
)

// request is a Storage that has been found to make sense.
type request struct {
	driver     *driver
	source     string
	fstype     string
	flags      uintptr
	taken      uintptr // flags that it takes back: from a mount that is given new options
	data       string
	mountPoint string
	shared     bool
	serial     string // of the disk, as the host has promised it; "" where it has not
}

func parse(s *agentpb.Storage) (request, error) {
	refuse := func(format string, args ...any) (request, error) {
		return request{}, refusal.New(refusal.InvalidArgument, "storage %.200q: "+format, append([]any{s.MountPoint}, args...)...)
	}
	if s == nil {
		return request{}, refusal.New(refusal.InvalidArgument, "storage: empty message")
	}
	driver := driverOf(s.Driver)
	if driver == nil {
		return refuse("unknown driver %.40q, this agent has %v", s.Driver, Drivers())
	}
	if len(s.Source) > pathBytes || strings.ContainsRune(s.Source, 0) || !utf8.ValidString(s.Source) {
		return refuse("source %.40q: at most %d bytes of UTF-8, none of them 0", s.Source, pathBytes)
	}
	clean := filepath.Clean(s.MountPoint)
	if !isMountPoint(clean) {
		return refuse("the mount point must be an absolute path below /")
	}
	if err := contract.Check(s); err != nil {
		return request{}, refusal.New(refusal.KindOf(err), "storage %.200q: %w", s.MountPoint, err)
	}
	serial, others, err := promisedSerial(driver, s.DriverOptions)
	if err != nil {
		return refuse("driver_options: %w", err)
	}
	if len(others) > 0 {
		return request{}, refusal.New(refusal.Unimplemented, "storage %.200q: driver_options %.80q: this agent has none but %s of a disk", s.MountPoint, others, serialOption)
	}
	flags, taken, data := mountOptions(s.Options)
	if len(data) > dataBytes || strings.ContainsRune(data, 0) || !utf8.ValidString(data) {
		return refuse("mount options of %d bytes: at most %d of UTF-8, none of them 0", len(data), dataBytes)
	}
	r := request{driver: driver, source: s.Source, fstype: s.Fstype, flags: flags, taken: taken, data: data, mountPoint: clean, shared: s.Shared, serial: serial}
	if err := driver.check(r); err != nil {
		return request{}, refusal.New(refusal.KindOf(err), "storage %.200q: %w", s.MountPoint, err)
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

// isMountPoint tells whether a path is clean, absolute and below /. One that is
// no UTF-8 could be written neither into a message nor into the state.
func isMountPoint(path string) bool {
	return utf8.ValidString(path) && filepath.IsAbs(path) && path == filepath.Clean(path) && path != "/" && len(path) <= pathBytes && !strings.ContainsRune(path, 0)
}
