// Package blockdev finds the block device that a Storage's source names. It waits for changes that
// the kernel does not know yet: a device that is being plugged in, or a capacity that the host has
// just raised. It looks in sysfs first and then waits for uevents
// (Documentation/ABI/testing/sysfs-uevent, lib/kobject_uevent.c); it never polls.
package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// Device is a block device of this kernel. It holds no file open.
type Device struct {
	Path   string // the node, such as /dev/vda
	Name   string // the kernel's name, such as vda
	Number uint64 // dev_t, as in stat's st_rdev
	Seq    uint64 // diskseq: differs for the next disk with this name and number; 0 if the kernel shows none
}

// ByPath returns the device that a node such as /dev/vda, or a link such as /dev/disk/by-id/…,
// leads to. The error wraps fs.ErrNotExist if nothing is there yet.
func ByPath(path string) (Device, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return Device{}, fmt.Errorf("block device %s: %w", path, err)
	}
	number, err := NumberOf(real)
	if err != nil {
		return Device{}, err
	}
	return Device{Path: real, Name: filepath.Base(real), Number: number, Seq: SeqOf("/", number)}, nil
}

// NumberOf returns the dev_t of a device's node.
func NumberOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, errkind.New(errkind.InvalidArgument, "%s is not a block device", path)
	}
	return st.Rdev, nil
}

// NameOf returns the kernel's name of the device with a dev_t. The error wraps fs.ErrNotExist if
// the kernel has no such device (any more). root is "/" outside of tests.
func NameOf(root string, number uint64) (string, error) {
	target, err := os.Readlink(numberDir(root, number))
	return filepath.Base(target), err
}

// SeqOf returns the diskseq of the device with a dev_t; for a partition, that of its disk. It
// returns 0 if there is none. root is "/" outside of tests.
func SeqOf(root string, number uint64) uint64 { return seqIn(numberDir(root, number)) }

// seqIn is SeqOf for a directory in sysfs.
func seqIn(dir string) uint64 {
	for _, of := range []string{"diskseq", "../diskseq"} {
		text, err := os.ReadFile(dir + "/" + of) // filepath.Join would resolve .. without following the link
		if err != nil {
			continue
		}
		seq, err := strconv.ParseUint(strings.TrimSuffix(string(text), "\n"), 10, 64)
		if err == nil {
			return seq
		}
	}
	return 0
}

func numberDir(root string, number uint64) string {
	return filepath.Join(root, "sys/dev/block", fmt.Sprintf("%d:%d", unix.Major(number), unix.Minor(number)))
}

// ByNumber returns the device with a dev_t. The error wraps fs.ErrNotExist if the kernel has no
// such device (any more).
func ByNumber(number uint64) (Device, error) {
	link := numberDir("/", number)
	target, err := os.Readlink(link)
	if err != nil {
		return Device{}, err
	}
	return fromSysfs("/", filepath.Join(filepath.Dir(link), target))
}

// fromSysfs returns the device of a sysfs directory …/block/NAME. root is "/" outside of tests. A
// slash in the node's name is an exclamation mark in sysfs (device_get_devnode in
// drivers/base/core.c).
func fromSysfs(root, dir string) (Device, error) {
	name := filepath.Base(dir)
	text, err := os.ReadFile(filepath.Join(dir, "dev"))
	if errors.Is(err, unix.ENODEV) { // the device is leaving, but its file still exists
		err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	if err != nil {
		return Device{}, err
	}
	number, err := ParseNumber(string(text))
	if err != nil {
		return Device{}, fmt.Errorf("%s/dev: %w", dir, err)
	}
	return Device{Path: filepath.Join(root, "dev", strings.ReplaceAll(name, "!", "/")), Name: name, Number: number, Seq: seqIn(dir)}, nil
}

// ParseNumber parses the dev_t in a file of sysfs, "major:minor\n".
func ParseNumber(text string) (uint64, error) {
	major, minor, ok := strings.Cut(strings.TrimSuffix(text, "\n"), ":")
	ma, err1 := strconv.ParseUint(major, 10, 32)
	mi, err2 := strconv.ParseUint(minor, 10, 32)
	if !ok || err1 != nil || err2 != nil {
		return 0, fmt.Errorf("%.40q is not major:minor", text)
	}
	return unix.Mkdev(uint32(ma), uint32(mi)), nil
}

// Size returns the device's size in bytes as the kernel knows it now (BLKGETSIZE64).
func (d Device) Size() (uint64, error) {
	file, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	return SizeOf(file)
}

// SizeOf is Size of a device that is open.
func SizeOf(disk *os.File) (size uint64, err error) {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, disk.Fd(), unix.BLKGETSIZE64, uintptr(unsafe.Pointer(&size))); errno != 0 {
		return 0, &fs.PathError{Op: "ioctl(BLKGETSIZE64)", Path: disk.Name(), Err: errno}
	}
	return size, nil
}

// AwaitSize returns the device's size as soon as it is at least bytes. If ctx ends first, AwaitSize
// returns the size so far and an error that wraps ctx's. It makes a SCSI disk reread its capacity
// once, because the host may not have announced the change. It does not open the device; the error
// wraps fs.ErrNotExist if that is gone.
func (d Device) AwaitSize(ctx context.Context, bytes uint64) (size uint64, err error) {
	reached := func() (bool, error) {
		size, err = d.Bytes()
		return err == nil && size >= bytes, err
	}
	if ok, err := reached(); ok || err != nil {
		return size, err
	}
	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	go d.rescan(asking, "/") // not awaited: it lasts as long as the controller does
	err = await(ctx, reached)
	return size, err
}

// Find returns the device for a Storage's source, which is a path below /dev or a PCI path (see
// protocols/pcipath). It waits until ctx ends for a device that does not exist yet; the error then
// wraps ctx's. serial is the promised serial, or "". While a disk with another serial is in the
// device's place, Find waits, too: if that disk is still there when ctx ends, the error is a
// FailedPrecondition that names both serials.
func Find(ctx context.Context, source, serial string) (Device, error) {
	look, err := lookup(ctx, source)
	if err != nil {
		return Device{}, err
	}
	return awaitDevice(ctx, serial, func() ([]Device, error) {
		device, err := look()
		return []Device{device}, err
	})
}

// awaitDevice looks until there is exactly one device that can be opened and has the promised
// serial, or until an error that waiting does not fix.
func awaitDevice(ctx context.Context, serial string, look func() ([]Device, error)) (device Device, err error) {
	var found error // the last error of look
	err = await(ctx, func() (bool, error) {
		devices, err := look()
		if err == nil {
			devices, err = promised(ctx, devices, serial)
		}
		if err == nil && len(devices) > 1 {
			err = errkind.New(errkind.FailedPrecondition, "%s and %s both match the source: name one of them", devices[0].Path, devices[1].Path)
		}
		if err == nil {
			device = devices[0]
			_, err = device.Size()
		}
		found = err
		_, other := errors.AsType[*errOtherDisk](err)
		// A new disk has a node before it can be opened, and its uevent comes when it can be opened
		// (device_add_disk in block/genhd.c).
		if other || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil && ctx.Err() != nil {
		if _, other := errors.AsType[*errOtherDisk](found); other {
			return Device{}, refuseOther(found)
		}
	}
	return device, err
}

// await is Await for block devices.
func await(ctx context.Context, done func() (bool, error)) error { return Await(ctx, "block", done) }

// Await calls done until it returns true or an error: at once, and then after every uevent of a
// subsystem. If ctx ends first, Await returns ctx's error. It subscribes only if the first call
// returns false, and calls done again after it has subscribed, so that no event can be lost in
// between.
func Await(ctx context.Context, subsystem string, done func() (bool, error)) error {
	if ok, err := done(); ok || err != nil {
		return err
	}
	events, err := subscribe()
	if err != nil {
		return err
	}
	defer events.close()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if _, err := events.next(ctx, subsystem); err != nil {
			return err
		}
	}
}

// FollowChanges calls changed after every uevent of a block device that is gone or has changed,
// such as its size, with the kernel's name of the device, until ctx ends. It calls changed with ""
// at once, and when events were lost: then any device may have changed.
func FollowChanges(ctx context.Context, changed func(name string)) error {
	events, err := subscribe()
	if err != nil {
		return err
	}
	defer events.close()
	for changed(""); ; {
		e, err := events.next(ctx, "block")
		switch {
		case err != nil:
			return err
		case e.action == "": // after an overrun
			changed("")
		case e.action == "change", e.action == "remove":
			changed(filepath.Base(e.devpath))
		}
	}
}

// Bytes returns the device's size without opening it. The error wraps fs.ErrNotExist if the device
// is gone, also if another disk has its number now.
func (d Device) Bytes() (uint64, error) {
	sectors, err := readCount(filepath.Join(numberDir("/", d.Number), "size"))
	// sysfs has no attribute of a device that is just leaving (ENODEV).
	if errors.Is(err, unix.ENODEV) || err == nil && SeqOf("/", d.Number) != d.Seq {
		err = fs.ErrNotExist
	}
	if err != nil {
		return 0, fmt.Errorf("block device %s: %w", d.Path, err)
	}
	return sectors * sectorBytes, nil
}

// Bytes returns the size of the device with a dev_t, without opening it; 0 if the kernel has no
// such device. root is "/" outside of tests.
func Bytes(root string, number uint64) uint64 {
	sectors, err := readCount(filepath.Join(numberDir(root, number), "size"))
	if err != nil {
		return 0
	}
	return sectors * sectorBytes
}

// sectorBytes is the unit of sizes in sysfs, whatever the device's own sectors are
// (Documentation/ABI/stable/sysfs-block).
const sectorBytes = 512
