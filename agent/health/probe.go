package health

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/mount"
)

// probeBytes is a page, the smallest cost of a write to a file.
const probeBytes = 4096

// finding is the result of an examination. failure is an error that says nothing about the
// filesystem.
type finding struct {
	conditions []Condition
	details    []string // that change while a condition lasts, for the log
	failure    error
	end        uint64         // the filesystem's end on its disk, in bytes; 0 if it was not read
	refused    bool           // the probe was refused, which says nothing about the disk
	again      bool           // the next look will know more
	looked     bool           // the mount was found in its place
	space      *unix.Statfs_t // nil if it was not read
}

// examine checks every signal once. It blocks as long as the device does. It neither writes to nor
// opens a mount that is not owned. stopped is set if the kernel has logged that it made itself
// read-only.
func examine(t Target, owned, stopped bool) finding {
	if isGone(t.Device) {
		return finding{conditions: []Condition{t.condition(Inaccessible, ReasonDeviceGone, "the device is gone from under the mount: unmount, attach the disk again and mount it")}}
	}
	fstype, ok := filesystem.Lookup(t.FSType)
	if !ok {
		return finding{} // the effect of a probe on this type is not known
	}
	readOnly, err := look(t, fstype.Faults)
	end, size := ends(t, fstype)
	probed, refused := err == nil && owned && !readOnly && end <= size, false
	if probed {
		err = probe(t)
		if errors.Is(err, unix.EIO) && isShutDown(t, fstype.Faults) {
			err = fmt.Errorf("%w: %w", unix.ESHUTDOWN, err)
		}
		refused = errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) // such as after chattr +i
	}
	count, errorsErr := recordedErrors(fstype, t.Device.Path) // after the probe, which may have caused an error
	var itself, isDown bool
	if fstype.Faults.StopsReadOnly && (count > 0 || mayBeStopped(t, fstype.Faults, probed && err == nil)) {
		itself, isDown = stoppedItself(t, fstype.Faults, owned, count)
	}
	stopped = fstype.Faults.StopsReadOnly && (stopped || itself)
	// A remount that has begun since look refuses writes, and may not show in the flags yet. No
	// filesystem stops by itself without a record.
	remounting := errors.Is(err, unix.EROFS) && !stopped && count == 0
	if refused || remounting {
		probed, err = false, nil
	}
	if err == nil && !probed && stopped {
		err = unix.EROFS
	}
	if fstype.Faults.StopsReadOnly && isDown && !errors.Is(err, errUnmounted) {
		err = unix.ESHUTDOWN
	}
	f := judge(t, fstype.Faults.Repair, err)
	f.looked = true
	f.end, f.refused, f.again = end, refused || remounting, remounting
	if f.failure == nil && end > size {
		f.conditions = append([]Condition{t.condition(Inaccessible, ReasonDeviceTooSmall,
			"its disk ends before the filesystem does: reads and writes beyond the disk's end fail: unmount, restore the disk's size and content, check it and mount it")}, f.conditions...)
		f.details = append(f.details, fmt.Sprintf("its disk has %d bytes, the filesystem ends at %d", size, end))
	}
	if errorsErr == nil && count > 0 {
		f.conditions = append(f.conditions, t.condition(Degraded, ReasonRecordedErrors,
			"its superblock records errors: unmount, run %s on the detached disk and mount it again", fstype.Faults.Repair))
		f.details = append(f.details, fmt.Sprintf("its superblock records %d errors", count))
	}
	return f
}

// isGone reports whether the kernel has no such device any more, or none below the mapping that it
// is.
func isGone(d blockdev.Device) bool {
	_, err := os.Stat(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(d.Number), unix.Minor(d.Number)))
	if err == nil && d.IsMapping() {
		_, err = blockdev.StackOf(d)
	}
	return errors.Is(err, fs.ErrNotExist)
}

// ends returns the filesystem's end and its disk's size in bytes. The end is 0 if it cannot be
// read; the size is as large as the end if it cannot be read, and if the end lies within the disk's
// last block. Data beyond the disk's end is not proven lost, because the host may restore the size.
// The filesystem's end is read before the disk's size, so that a growth in between is not reported.
func ends(t Target, fstype filesystem.Type) (end, size uint64) {
	disk, err := os.Open(t.Device.Path)
	if err != nil {
		return 0, 0
	}
	defer disk.Close()
	extent, err := fstype.OnDisk(disk)
	if err != nil {
		return 0, 0 // the probe reports the problem
	}
	end = extent.Bytes()
	if size, err = blockdev.SizeOf(disk); err == nil && t.Device.IsMapping() {
		size = t.Device.Reach()
	}
	if err != nil || extent.EndsWithin(size) {
		size = max(size, end)
	}
	return end, size
}

func recordedErrors(fstype filesystem.Type, device string) (count uint64, err error) {
	disk, err := os.Open(device)
	if err != nil {
		return 0, err
	}
	defer disk.Close()
	return fstype.RecordedErrors(disk)
}

// look checks the filesystem without a write, and without an open file that could make an unmount
// fail.
func look(t Target, faults filesystem.Faults) (readOnly bool, err error) {
	if !inSight(t) { // otherwise a server mounted over a parent directory may not answer
		return false, errUnmounted
	}
	mark, err := mount.Look(t.Mountpoint)
	if err == nil && !t.Mount.Bears(mark) || errors.Is(err, mount.ErrNotExist) || errors.Is(err, mount.ErrNoMount) {
		return false, errUnmounted
	}
	var st unix.Stat_t
	if err := unix.Stat(t.Mountpoint, &st); err != nil {
		if errors.Is(err, unix.EIO) && faults.RootFails {
			err = unix.ESHUTDOWN
		}
		return false, &fs.PathError{Op: "stat", Path: t.Mountpoint, Err: err}
	}
	var all unix.Statfs_t
	if err := unix.Statfs(t.Mountpoint, &all); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: t.Mountpoint, Err: err}
	}
	return all.Flags&unix.ST_RDONLY != 0, nil
}

// inSight reports whether the target's path leads to it, according to mountinfo. It returns true if
// mountinfo cannot be read.
func inSight(t Target) bool {
	mounts, err := mount.Now()
	return err != nil || t.Mount.ID == 0 || mounts.IsInSight(t.Mount.ID)
}

// isShutDown reports whether the whole filesystem has shut down, and not just one write has failed.
func isShutDown(t Target, faults filesystem.Faults) bool {
	_, err := look(t, faults)
	return errors.Is(err, unix.ESHUTDOWN)
}

// stoppedItself reports whether a filesystem has made itself read-only after an error, which an
// ext4's superblock records, and whether it has shut down. In the first case only the filesystem is
// read-only (SB_RDONLY, or emergency_ro since Linux 6.13), while the mount's flags stay rw. An
// administrator's remount changes the mount's flags, too, but a little later: so a btrfs, which
// records nothing, is asked if it is owned. Linux 6.13 and newer show the second case.
func stoppedItself(t Target, faults filesystem.Faults, owned bool, recorded uint64) (stopped, down bool) {
	top, err := mount.Topmost(t.Mountpoint)
	if err != nil || top == nil {
		return false, false
	}
	stopped = isStopped(top, recorded)
	if faults.Stopped != nil && owned && isStopped(top, 1) {
		dir, err := os.Open(t.Mountpoint)
		if err != nil {
			return false, false
		}
		defer dir.Close()
		stopped = sameMount(dir, t) == nil && faults.Stopped(dir)
	}
	return stopped, hasOption(top.VFSOptions, "shutdown")
}

// mayBeStopped reports whether stoppedItself may find something although no error is recorded: it
// reads the lines of all mounts. A filesystem that has just taken a write goes on. Linux before
// 6.8, which has no unique numbers of mounts, shows nothing of an ext4 then.
func mayBeStopped(t Target, faults filesystem.Faults, writes bool) bool {
	return !writes && (t.Mount.Unique != 0 || faults.Stopped != nil)
}

func isStopped(m *mount.Info, recorded uint64) bool {
	return hasOption(m.VFSOptions, "emergency_ro") || recorded > 0 && hasOption(m.VFSOptions, "ro") && !hasOption(m.Options, "ro")
}

func hasOption(options, option string) bool {
	return slices.Contains(strings.Split(options, ","), option)
}

// probe tests whether the filesystem still takes writes: it creates an unnamed file, writes a page
// and calls fsync. That detected every fault of the table in doc.go, and leaves nothing behind. It
// may block as long as the device does.
func probe(t Target) error {
	file, err := os.OpenFile(t.Mountpoint, unix.O_TMPFILE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := sameMount(file, t); err != nil {
		return err
	}
	if _, err := file.Write(make([]byte, probeBytes)); err != nil {
		return err
	}
	return file.Sync()
}

// errUnmounted means that the mount point now leads elsewhere.
var errUnmounted = errors.New("it is no longer mounted here")

// sameMount keeps the probe from writing to the directory below a mount point, or to another mount
// there, after somebody else has unmounted the target.
func sameMount(file *os.File, t Target) error {
	mine, err := t.Mount.Has(file)
	if err == nil && !mine {
		err = errUnmounted
	}
	return err
}

// judge turns a probe's error into a condition if it is one. Other errors, such as a lack of
// memory, are failures of the probe. repair is the filesystem's command for a detached disk. The
// errno is a detail: it may be another one at the next probe.
func judge(t Target, repair string, err error) finding {
	one := func(status Status, reason, format string, args ...any) finding {
		return finding{conditions: []Condition{t.condition(status, reason, format, args...)}, details: []string{cause(err).Error()}}
	}
	is := func(errnos ...unix.Errno) bool {
		for _, errno := range errnos {
			if errors.Is(err, errno) {
				return true
			}
		}
		return false
	}
	switch {
	case err == nil:
		return finding{}
	case errors.Is(err, fs.ErrNotExist), is(unix.ENOTDIR):
		return finding{failure: fmt.Errorf("%w: %w", errUnmounted, err)}
	case is(unix.ENOSPC, unix.EDQUOT):
		return one(Degraded, ReasonOutOfSpace, "out of space or inodes: delete files or grow the volume")
	case is(unix.EROFS):
		return one(Inaccessible, ReasonReadOnly, "rejects writes, the kernel stopped it after an error: repair the disk, unmount, run %s on it and mount it again", repair)
	case is(unix.ESHUTDOWN):
		return one(Inaccessible, ReasonShutdown, "reads and writes fail, the filesystem has shut down: repair the disk, unmount and mount it again")
	case is(unix.EIO, unix.ENXIO, unix.ENODEV, unix.EUCLEAN):
		return one(Inaccessible, ReasonIOError, "writes fail: repair the disk, unmount and mount it again")
	}
	return finding{failure: err}
}

// cause returns the errno of an error of package os without its path, which matters only to the
// probe.
func cause(err error) error {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return path.Err
	}
	return err
}
