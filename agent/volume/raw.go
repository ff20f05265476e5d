package volume

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"path/filepath"
	"time"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
)

// raw is a block device that a container uses without a filesystem of the agent's. It is named by
// its path below /dev (blockdev.Named), is measured and awaits its new size, and no call writes to
// it. The agent keeps nothing of it, because the kernel knows its size.
//
//	twice            the device has the size already
//	late, cut off    nothing was begun; the same call waits again
//	beside another   each waits for itself, and changes nothing
//	mounted          refused: the filesystem has to grow, too, so its own path is the volume's
//	detached         the wait ends with NotFound, also if another disk gets the name
//	after a restart  the same
//
// Its health is not examined: nobody can say what a write to it would destroy.
type raw struct {
	path   string // as the caller names it
	device blockdev.Device
}

// rawAt returns the raw volume that a path names; nil if the path names no device.
func rawAt(ctx context.Context, path string) (*raw, error) {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	path = filepath.Clean(path)
	device, is, err := blockdev.Named(ctx, path)
	r := &raw{path, device}
	switch {
	case !is:
		return nil, nil
	case err != nil && ctx.Err() != nil:
		return nil, errkind.New(errkind.DeadlineExceeded, "volume %.200q: %w", path, err)
	case err != nil:
		return nil, r.refuse(err)
	}
	if at := mount.Places(device.Number); len(at) > 0 {
		return nil, errkind.New(errkind.FailedPrecondition, "volume %.200q is mounted in this guest: name the path that it is mounted at, %s", path, at[0])
	}
	return r, nil
}

// refuse gives an error that the device is gone its kind.
func (r *raw) refuse(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errkind.New(errkind.NotFound, "volume %.200q: its disk is not in this guest: %w", r.path, err)
	}
	return err
}

// check returns the device's size, and the size that a request leads to, in bytes. It refuses a
// size that the device can never have. A size of 0 means the size that it has.
func (r *raw) check(size uint64) (has, goal uint64, err error) {
	if has, err = r.device.Bytes(); err != nil {
		return 0, 0, r.refuse(err)
	}
	if goal = size - size%rawGrain; size == 0 {
		goal = has
	}
	part, isPart := blockdev.PartitionOf("/", r.device.Number)
	switch {
	case goal < has:
		err = errkind.New(errkind.OutOfRange, "volume %s has %d bytes and never shrinks: %d requested", r.path, has, size)
	case goal > math.MaxInt64:
		err = errkind.New(errkind.FailedPrecondition, "volume %s cannot grow to %d bytes: no device has more than %d", r.path, size, int64(math.MaxInt64))
	case goal > has && isPart:
		err = errkind.New(errkind.FailedPrecondition, "volume %s cannot grow to %d bytes: it is a partition of %s and has %d: grow the partition (growpart, or sfdisk)", r.path, size, part.Disk, has)
	case goal > has && r.device.IsMapping():
		err = errkind.New(errkind.FailedPrecondition, "volume %s cannot grow to %d bytes: it is a mapping and has %d: grow it with the tool that made it, such as lvextend, cryptsetup resize or dmsetup", r.path, size, has)
	}
	return has, goal, err
}

// rawGrain is the kernel's unit of a device's size, in bytes.
const rawGrain = 512

// resize waits until the device has the size, at most for wait and until shortly before ctx's
// deadline.
func (r *raw) resize(ctx context.Context, size uint64, wait time.Duration) error {
	has, goal, err := r.check(size)
	if err != nil || has >= goal {
		return err
	}
	ctx, cancel := deadline.Early(ctx)
	defer cancel()
	waiting, stop := context.WithTimeout(ctx, wait)
	defer stop()
	has, err = r.device.AwaitSize(waiting, goal)
	if err != nil && waiting.Err() != nil && !errors.Is(err, fs.ErrNotExist) {
		return refuseSmaller(r.device, has, size, err)
	}
	return r.refuse(err)
}

// refuseSmaller returns the error of a call that has waited for a disk's new size in vain.
func refuseSmaller(disk blockdev.Device, has, size uint64, err error) error {
	return errkind.New(errkind.DeadlineExceeded, "%s has %d bytes in this guest, not yet the requested %d: resize the disk and try again: %w", disk.Path, has, size, err)
}

// grow is resize with progress.
func (r *raw) grow(ctx context.Context, size uint64, report func(Progress) error) error {
	from, goal, err := r.check(size)
	if err == nil {
		err = report(Progress{From: from, Now: from, Goal: goal})
	}
	if err == nil {
		err = r.resize(ctx, size, forCaller)
	}
	if err != nil {
		return err
	}
	now, err := r.device.Bytes()
	if err != nil {
		return r.refuse(err)
	}
	return report(Progress{From: from, Now: now, Goal: now})
}

// stats returns the device's capacity. How much of it is used, only its user knows.
func (r *raw) stats() (Stats, error) {
	has, err := r.device.Bytes()
	return Stats{Bytes: Usage{Total: has}, Unexamined: true}, r.refuse(err)
}

func (r *raw) report() (Report, error) {
	has, err := r.device.Bytes()
	return Report{Path: r.path, Devices: []string{r.device.Path}, DeviceBytes: has}, r.refuse(err)
}
