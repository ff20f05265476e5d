package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/mount"
)

// Volume is one mount for as long as it is mounted.
type Volume struct {
	Mountpoint string
	FSType     string          // as in mountinfo
	Device     blockdev.Device // zero if there is no block device
	identity   mount.Identity
	behind     string            // the mount point of a filesystem with a server that the path leads through, or ""
	watch      *health.Watch     // nil if there is no block device
	past       health.Past       // the initial past of the watch
	options    string            // of the mount when the volume was made, for the watch
	growing    chan struct{}     // the lock; a channel, so that a waiting call can give up
	proven     filesystem.Proven // seen by earlier growths; used under the lock
	changes    *mount.Changes
	watchers   *watchers

	mu        sync.Mutex
	devices   []string      // as in Report
	readOnly  bool          // by the mount's options when it was last seen in mountinfo
	end       uint64        // the filesystem's end, in bytes, as a growth has seen it last; 0 before
	progress  *Progress     // of the growth in progress; nil if there is none
	measuring *measurement  // nil if none is in progress
	last      *Stats        // nil until one has succeeded
	seen      uint64        // the count of changes at which the mount was last seen in its place, or 0
	flushes   uint64        // the number of flushes that have begun
	flushed   uint64        // the number of the last flush that has ended
	frozen    *part         // of the lease that has frozen the volume; nil if none has
	froze     chan struct{} // closed when a lease freezes the volume; nil if nobody waits for it
}

// discover makes a Volume, not watched yet, of the mount with the mark, or of the topmost mount if
// mark is zero.
func discover(path string, mark mount.Mark) (*Volume, error) {
	for _, read := range []func() (*mount.List, error){mount.Now, mount.Reread} { // a folder above may have been renamed
		mounts, err := read()
		if err != nil {
			return nil, err
		}
		for _, info := range slices.Backward(mounts.Stack(path)) {
			identity := mounts.Identify(info)
			if mark == (mount.Mark{}) || identity.Bears(mark) {
				return newVolume(mounts, info, identity)
			}
		}
	}
	return nil, errkind.New(errkind.NotFound, "volume %.200q: nothing is mounted there any more", path)
}

// newVolume makes a Volume, not watched yet, of one of the mounts.
func newVolume(mounts *mount.List, info *mount.Info, identity mount.Identity) (v *Volume, err error) {
	v = &Volume{Mountpoint: info.Mountpoint, FSType: info.FSType, identity: identity, behind: mounts.Behind(info.Mountpoint), growing: make(chan struct{}, 1)}
	v.readOnly, v.devices, v.options = isReadOnly(info), pathsOf(identity.Devices), health.MountOptions(info)
	if len(identity.Devices) == 1 { // tmpfs, virtio-fs and overlay have no device, a btrfs may have several
		v.Device, err = deviceOf(identity.Devices[0], info.Source)
	}
	return v, err
}

func deviceOf(d mount.Device, source string) (blockdev.Device, error) {
	device, err := blockdev.ByNumber(d.Number)
	if errors.Is(err, fs.ErrNotExist) { // the disk was removed from under the mount
		return blockdev.Device{Path: source, Name: filepath.Base(source), Number: d.Number, Seq: d.Seq}, nil
	}
	return device, err
}

// own makes the volume owned, if it has a block device.
func (v *Volume) own() {
	if v.watch != nil && !v.watch.Owned() {
		v.watch.Own()
		v.watchers.changed(v)
	}
}

// Owned reports whether the volume has an owner, and so is probed by writing.
func (v *Volume) Owned() bool { return v.watch != nil && v.watch.Owned() }

// alone waits, until shortly before ctx ends, for the volume's lock and for the end of a probe in
// progress. Until done is called, only the call that grows, freezes, flushes or unmounts the volume
// waits for its disk.
func (v *Volume) alone(ctx context.Context) (done func(), err error) {
	if err := v.lock(ctx); err != nil {
		return nil, err
	}
	if v.watch == nil {
		return v.unlock, nil
	}
	early, cancel := deadline.Early(ctx)
	defer cancel()
	if err := v.watch.Pause(early); err != nil {
		v.unlock()
		return nil, errkind.New(errkind.DeadlineExceeded, "volume %s: a look at it has not ended, the disk below %s does not answer: %w", v.Mountpoint, v.Device.Path, err)
	}
	return func() { v.watch.Resume(); v.unlock() }, nil
}

// aloneAtOnce is alone if nothing has to be waited for; otherwise ok is false.
func (v *Volume) aloneAtOnce() (done func(), ok bool) {
	select {
	case v.growing <- struct{}{}:
	default:
		return nil, false
	}
	if v.watch == nil {
		return v.unlock, true
	}
	if !v.watch.PauseAtOnce() {
		v.unlock()
		return nil, false
	}
	return func() { v.watch.Resume(); v.unlock() }, true
}

// lock waits for the volume's lock. It gives up shortly before ctx's deadline, so that the error
// still reaches the caller, and at once if a lease freezes the volume or has frozen it.
func (v *Volume) lock(ctx context.Context) error {
	ctx, cancel := deadline.Early(ctx)
	defer cancel()
	select {
	case v.growing <- struct{}{}: // succeeds even if there is no time to wait
		return nil
	default:
	}
	was := health.Ended(v.Device.Number)
	froze := v.untilFrozen()
	select {
	case v.growing <- struct{}{}:
		return nil
	case <-froze:
		return errkind.New(errkind.FailedPrecondition, "volume %s is %w: thaw it (ThawVolumes), or wait for the lease's end, and call again", v.Mountpoint, errFrozen)
	case <-ctx.Done():
		return errkind.New(errkind.DeadlineExceeded, "volume %s: another call that grows, flushes or unmounts it has not ended, %s: %w", v.Mountpoint, v.since(was), context.Cause(ctx))
	}
}

func (v *Volume) unlock() { <-v.growing }

// since describes how the volume's disk has answered since its count of ended requests had the
// value was.
func (v *Volume) since(was uint64) string {
	if v.Device.Path == "" {
		return v.FSType + " has not answered"
	}
	var hangs bool
	var silent time.Duration
	if v.watch != nil {
		hangs, silent = v.watch.Hangs(), v.watch.Silent()
	}
	return "the disk below " + v.Device.Path + " " + answers(hangs, health.Ended(v.Device.Number)-was, silent)
}

// silence is how long a disk may complete no request and still be reported as answering.
const silence = 3 * time.Second

// answers describes how a disk answers. The disk has ended a number of requests, and none for the
// duration silent.
func answers(hangs bool, ended uint64, silent time.Duration) string {
	switch {
	case hangs:
		return "hangs"
	case ended == 0:
		return "has not answered meanwhile"
	case silent >= silence:
		return fmt.Sprintf("has completed %d requests meanwhile, but none for %v", ended, silent.Round(time.Second))
	}
	return fmt.Sprintf("is slow: it has completed %d requests meanwhile", ended)
}
