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

// virtioFS is a folder of the host, by the tag of its device
// (Documentation/filesystems/virtiofs.rst). The kernel needs its module virtiofs.
var virtioFS = &driver{
	name: "virtio-fs", volume: true,
	check: func(r request) error {
		if r.fstype != "virtiofs" {
			return errkind.New(errkind.InvalidArgument, "unknown fstype %.40q, driver virtio-fs has virtiofs", r.fstype)
		}
		if len(r.source) == 0 || len(r.source) > tagBytes {
			return errkind.New(errkind.InvalidArgument, "source %.40q is no virtio-fs tag: give 1 to %d bytes", r.source, tagBytes)
		}
		return nil
	},
	find: func(ctx context.Context, r request) (origin, error) {
		return origin{path: r.source}, blockdev.Await(ctx, "virtio", hasShare)
	},
	mount: mountTag, unmount: unmount, there: (*mounted).isMounted, couldGo: couldUnmount,
}

// tagBytes is how long a device's tag can be (virtio 1.2, 5.11.4).
const tagBytes = 36

// tagLimit is how long to wait for a device with the tag.
const tagLimit = time.Second

// mountTag tries again as long as no device has the tag. A new device is in sysfs before
// its driver knows the tag, and an event follows when it does. mount(2) answers a wrong
// option with EINVAL too, so that refusal comes a second later.
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

// hasShare tells whether there is any virtio-fs device: kernels before 6.9 do
// not show whose tag it has, and mount(2) answers EINVAL where it is another's.
func hasShare() (bool, error) {
	found, err := filepath.Glob("/sys/bus/virtio/drivers/virtiofs/virtio*")
	return len(found) > 0, err
}
