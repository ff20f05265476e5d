package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
)

// bySerial begins udev's name for a virtio disk; the disk's serial follows
// (rules.d/60-persistent-storage.rules in systemd). Here the name leads to the disk without udev,
// too.
const bySerial = "/dev/disk/by-id/virtio-"

// SerialIn returns the serial in udev's name for a virtio disk, /dev/disk/by-id/virtio-SERIAL. ok
// is false for any other path.
func SerialIn(path string) (serial string, ok bool) {
	serial, ok = strings.CutPrefix(path, bySerial)
	if !ok || serial == "" || len(serial) > virtioSerial || strings.ContainsAny(serial, "/\x00") {
		return "", false
	}
	return serial, true
}

// Named returns the device that a clean path names by itself: /dev/NAME, with the kernel's name of
// the device, or a name that SerialIn knows. is is false if the path is neither. If there is no
// such device, the error wraps fs.ErrNotExist. Named reads sysfs and opens no node, so nothing that
// somebody has mounted below /dev can block it. A disk that does not answer with its serial is
// waited for until ctx ends.
func Named(ctx context.Context, path string) (d Device, is bool, err error) {
	if serial, ok := SerialIn(path); ok {
		d, err := withSerial(ctx, serial)
		return d, true, err
	}
	return named("/", path)
}

// named is Named of /dev/NAME. root is "/" outside of tests.
func named(root, path string) (d Device, is bool, err error) {
	name, below := strings.CutPrefix(path, "/dev/")
	if !below || name != filepath.Base(name) || strings.Trim(name, ".") == "" || strings.ContainsRune(name, 0) {
		return Device{}, false, nil
	}
	d, err = fromSysfs(root, filepath.Join(root, "sys/class/block", name))
	if errors.Is(err, fs.ErrNotExist) { // it may be a directory, such as /dev/shm
		return Device{}, false, nil
	}
	return d, true, err
}

// withSerial returns the virtio disk with a serial.
func withSerial(ctx context.Context, serial string) (Device, error) {
	dirs, err := filepath.Glob("/sys/bus/virtio/devices/*/block/*")
	if err != nil {
		return Device{}, err
	}
	var disks []Device
	for _, dir := range dirs {
		if d, err := fromSysfs("/", dir); err == nil { // otherwise it is just leaving
			disks = append(disks, d)
		}
	}
	if disks, err = promised(ctx, disks, serial); err == nil && len(disks) == 1 {
		return disks[0], nil
	}
	if _, other := errors.AsType[*errOtherDisk](err); other || err == nil && len(disks) == 0 {
		return Device{}, fmt.Errorf("no virtio disk has the serial %q: %w", serial, fs.ErrNotExist)
	}
	if err == nil {
		err = fmt.Errorf("%s and %s both have the serial %q", disks[0].Path, disks[1].Path, serial)
	}
	return Device{}, err
}
