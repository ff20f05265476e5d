// Package blockdev goes from a Storage's source to a block device, and waits
// for what the kernel has yet to learn: a device that is being plugged in, a
// capacity that the host has just raised. It looks in sysfs first and then
// waits for uevents (Documentation/ABI/testing/sysfs-uevent,
// lib/kobject_uevent.c); it never polls.
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

// Device is a block device of this kernel. It holds nothing open.
type Device struct {
	Path   string // the node, such as /dev/vda
	Name   string // the kernel's name, such as vda
	Number uint64 // dev_t, as in stat's st_rdev
	Seq    uint64 // diskseq: the next disk with this name and number has another one; 0 where the kernel shows none
}

// ByPath returns the device that a node such as /dev/vda or a link such as
// /dev/disk/by-id/… leads to. The error wraps fs.ErrNotExist when nothing is
// there yet.
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
		return 0, errkind.New(errkind.InvalidArgument, "%s is no block device", path)
	}
	return st.Rdev, nil
}

// NameOf returns the kernel's name of the device with a dev_t. The error wraps
// fs.ErrNotExist when the kernel has none (any more). root is "/" outside of tests.
func NameOf(root string, number uint64) (string, error) {
	target, err := os.Readlink(numberDir(root, number))
	return filepath.Base(target), err
}

// SeqOf returns the diskseq of the device with a dev_t, which is its disk's where it is
// a partition; 0 where there is none. root is "/" outside of tests.
func SeqOf(root string, number uint64) uint64 { return seqIn(numberDir(root, number)) }

// seqIn is SeqOf for a folder in sysfs.
func seqIn(dir string) uint64 {
	for _, of := range []string{"diskseq", "../diskseq"} {
		text, err := os.ReadFile(dir + "/" + of) // Join would lead past a link
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

// ByNumber returns the device with a dev_t. The error wraps fs.ErrNotExist
// when the kernel has none (any more).
func ByNumber(number uint64) (Device, error) {
	link := numberDir("/", number)
	target, err := os.Readlink(link)
	if err != nil {
		return Device{}, err
	}
	return fromSysfs("/", filepath.Join(filepath.Dir(link), target))
}

// fromSysfs returns the device of a sysfs directory …/block/NAME. root is "/"
// outside of tests. A slash of the node's name is an exclamation mark in sysfs
// (device_get_devnode in drivers/base/core.c).
func fromSysfs(root, dir string) (Device, error) {
	name := filepath.Base(dir)
	text, err := os.ReadFile(filepath.Join(dir, "dev"))
	if errors.Is(err, unix.ENODEV) { // it is leaving: its file is still there
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

// ParseNumber reads the dev_t of a file in sysfs, "major:minor\n".
func ParseNumber(text string) (uint64, error) {
	major, minor, ok := strings.Cut(strings.TrimSuffix(text, "\n"), ":")
	ma, err1 := strconv.ParseUint(major, 10, 32)
	mi, err2 := strconv.ParseUint(minor, 10, 32)
	if !ok || err1 != nil || err2 != nil {
		return 0, fmt.Errorf("%.40q is not major:minor", text)
	}
	return unix.Mkdev(uint32(ma), uint32(mi)), nil
}

// Size returns the device's bytes as the kernel has them now (BLKGETSIZE64).
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

// AwaitSize returns the device's size as soon as it is at least bytes. When
// ctx ends first it returns the size so far and an error that wraps ctx's. A
// SCSI disk is asked for its size once: its host may not have told.
func (d Device) AwaitSize(ctx context.Context, bytes uint64) (size uint64, err error) {
	reached := func() (bool, error) {
		size, err = d.Size()
		return err == nil && size >= bytes, err
	}
	if ok, err := reached(); ok || err != nil {
		return size, err
	}
	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	go d.rescan(asking, "/") // not awaited: it lasts for as long as a controller wants
	err = await(ctx, reached)
	return size, err
}

// Find returns the device for a Storage's source: a path below /dev as it is,
// or else a PCI path (see protocols/pcipath). A device that is not there yet
// is awaited until ctx ends; the error then wraps ctx's. So is one with the serial that
// was promised, "" for none, as long as another one is in its place: if it is there to
// the end, that is a FailedPrecondition which names both serials.
func Find(ctx context.Context, source, serial string) (Device, error) {
	look, err := lookup(source)
	if err != nil {
		return Device{}, err
	}
	return awaitDevice(ctx, serial, func() ([]Device, error) {
		device, err := look()
		return []Device{device}, err
	})
}

// awaitDevice looks until there is one device that can be opened, with the promised
// serial, or an error that waiting does not mend.
func awaitDevice(ctx context.Context, serial string, look func() ([]Device, error)) (device Device, err error) {
	var found error // last
	err = await(ctx, func() (bool, error) {
		devices, err := look()
		if err == nil {
			devices, err = promised(ctx, devices, serial)
		}
		if err == nil && len(devices) > 1 {
			err = errkind.New(errkind.FailedPrecondition, "%s and %s are both there: which one is meant?", devices[0].Path, devices[1].Path)
		}
		if err == nil {
			device = devices[0]
			_, err = device.Size()
		}
		found = err
		_, other := errors.AsType[*errOtherDisk](err)
		// A new disk has a node before it can be opened, and its uevent comes
		// when it can (device_add_disk in block/genhd.c).
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

// Await calls done until it answers true or fails: at once, and then after
// every uevent of a subsystem. When ctx ends first its error is returned. It
// subscribes only when the first answer is no, and asks again behind the
// subscription, so that no event can fall between.
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
