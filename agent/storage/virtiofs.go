package storage

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/errkind"
)

// virtioFS is a directory of the host, named by the tag of its device
// (Documentation/filesystems/virtiofs.rst). The kernel needs the module virtiofs.
var virtioFS = &driver{
	name: "virtio-fs", volume: true,
	check: func(r request) error {
		if r.fstype != "virtiofs" {
			return errkind.New(errkind.InvalidArgument, "unknown fstype %.40q, driver virtio-fs has virtiofs", r.fstype)
		}
		if len(r.source) == 0 || len(r.source) > tagBytes {
			return errkind.New(errkind.InvalidArgument, "source %.40q is not a virtio-fs tag: give 1 to %d bytes", r.source, tagBytes)
		}
		return nil
	},
	find: func(ctx context.Context, r request) (origin, error) {
		return origin{path: r.source}, blockdev.Await(ctx, "virtio", hasShare)
	},
	mount: mountTag, unmount: unmount, there: (*mounted).isMounted, couldGo: couldUnmount,
}

// tagBytes is the longest tag of a device (virtio 1.2, 5.11.4).
const tagBytes = 36

// tagLimit bounds the wait for a device with the tag.
const tagLimit = time.Second

// mountTag retries while no device has the tag. A new device appears in sysfs before its driver
// knows the tag, and an event follows when the driver does. mount(2) also answers EINVAL for a
// wrong option, so that this error is returned one second later.
func mountTag(ctx context.Context, d *devices, r request, from origin) (done did, err error) {
	ctx, cancel := context.WithTimeout(ctx, tagLimit)
	defer cancel()
	waitErr := blockdev.Await(ctx, "virtio", func() (bool, error) {
		done, err = mountOrigin(ctx, d, r, from)
		return !errors.Is(err, unix.EINVAL), nil
	})
	if waitErr != nil && ctx.Err() == nil {
		return done, errors.Join(err, waitErr)
	}
	return done, err
}

// hasShare reports whether any virtio-fs device exists. Kernels before 6.9 do not show a device's
// tag, and mount(2) answers EINVAL if no device has the requested tag.
func hasShare() (bool, error) {
	found, err := filepath.Glob("/sys/bus/virtio/drivers/virtiofs/virtio*")
	return len(found) > 0, err
}
