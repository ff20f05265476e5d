package volume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/filesystem"
	"github.com/directvol/directvol/agent/health"
)

// Resize grows the filesystem to size, the disk's size in bytes as the host sees it; 0 means to the
// device's end. If the device is a mapping of a disk (blockdev.Stack), the mapping grows first, and
// the filesystem then ends where the disk does, less what the mapping keeps for itself. A
// filesystem that ends within one block of size is left as it is: that is success, any number of
// times. A filesystem that already ends where the request leads is left as it is, too: an xfs is
// made to end with an allocation group, or with the device. If the device is still smaller than
// size, Resize waits for it, at most for wait and until shortly before ctx's deadline; then the
// error is DeadlineExceeded. The volume is not locked while it waits. Nothing ever shrinks.
func (v *Volume) Resize(ctx context.Context, size uint64, wait time.Duration) error {
	early, cancel := deadline.Early(ctx)
	defer cancel()
	waiting, cancel := context.WithTimeout(early, wait)
	defer cancel()
	for {
		err := v.reach(ctx, size, func(ctx context.Context, g *growth) error { return v.resize(ctx, g, size) })
		smaller, is := errors.AsType[*stillSmaller](err)
		if !is {
			return err
		}
		if err := v.awaitSize(waiting, smaller.disk, size); err != nil {
			return err
		}
	}
}

// Resize is Volume.Resize of the volume at path. The path of a block device below /dev that is not
// mounted names the device: Resize only waits until it has the size.
func (t *Table) Resize(ctx context.Context, path string, size uint64, wait time.Duration) error {
	if v := t.at(path); v != nil && v.isCurrent() {
		// Resize checks the files that it has opened, and so notices a mount made at this moment.
		if err := v.Resize(ctx, size, wait); errkind.Of(err) != errkind.NotFound {
			return err
		}
	}
	if r, err := rawAt(ctx, path); err != nil || r != nil {
		if err == nil {
			err = r.resize(ctx, size, wait)
		}
		return err
	}
	v, err := t.Lookup(path)
	if err != nil {
		return err
	}
	return v.Resize(ctx, size, wait)
}

// ResizeAtOnce is Resize of a healthy volume whose disk already has the size. It waits for nothing
// but the growth's own reads and writes, and stops between two steps of the growth when ctx ends.
// If it returns false, the caller calls Resize, which continues from there or reports why the
// volume does not grow. ResizeAtOnce is for the goroutine that reads a connection. A Resize that is
// called while ResizeAtOnce waits for the disk waits for it to return.
func (t *Table) ResizeAtOnce(ctx context.Context, path string, size uint64) bool {
	v := t.at(path)
	if v == nil || v.Device.IsMapping() { // a mapping waits for the requests in flight before it grows
		return false
	}
	conditions, ok := v.conditionsAtOnce()
	if !ok || len(conditions) > 0 {
		return false // the disk may be slow, or hang
	}
	done, ok := v.aloneAtOnce()
	if !ok {
		return false
	}
	defer done()
	if v.replaced(nil) { // under the lock: a server mounted above since then blocks one thread, and not one per call
		return false
	}
	return v.reachOpen(ctx, size, func(ctx context.Context, g *growth) error {
		if has, err := blockdev.SizeOf(g.Disk); err != nil || has < size {
			return cmp.Or(err, error(&stillSmaller{v.Device}))
		}
		return v.resize(ctx, g, size)
	}) == nil
}

// stillSmaller means that Resize must wait for the disk.
type stillSmaller struct{ disk blockdev.Device }

func (e *stillSmaller) Error() string {
	return e.disk.Path + " is smaller than the requested size"
}

// CheckResize is Volume.CheckResize of the volume at path, or of the block device that it names.
func (t *Table) CheckResize(ctx context.Context, path string, size uint64) error {
	if r, err := rawAt(ctx, path); err != nil || r != nil {
		if err == nil {
			_, _, err = r.check(size)
		}
		return err
	}
	v, err := t.Lookup(path)
	if err != nil {
		return err
	}
	return v.CheckResize(ctx, size)
}

// CheckResize refuses everything that Resize to size would refuse after the disk has grown, and
// changes nothing. It is for a caller that is about to grow the disk, which cannot be undone.
func (v *Volume) CheckResize(ctx context.Context, size uint64) error {
	return v.reach(ctx, size, func(_ context.Context, g *growth) error {
		if size != 0 {
			return nil
		}
		if err := g.fixed(); err != nil {
			return fmt.Errorf("volume %s cannot grow: %w", v.Mountpoint, err)
		}
		return g.fstype.CanGrow(g.Mounted, g.before.Blocks+1) // whether it can grow at all
	})
}

// reach runs do with the volume locked and open, if the filesystem could ever have the size. The
// caller gets an answer before its deadline, whatever the disk does.
func (v *Volume) reach(ctx context.Context, size uint64, do func(context.Context, *growth) error) error {
	if err := v.refuseInaccessible(toGrow); err != nil { // before the lock: a call that has it may be waiting for the disk
		return err
	}
	if _, err := v.stack(); err != nil { // before the lock, too: a look may be waiting for a suspended mapping
		return err
	}
	return v.inTime(ctx, func(ctx context.Context) error { return v.reachOpen(ctx, size, do) })
}

// lastWords is how long do may take to return its own error after its context has ended.
const lastWords = 100 * time.Millisecond

// lookAfter is the age of a call at which inTime starts to count the disk's finished requests; most
// calls have ended by then. The error of a call with less time does not mention the disk.
const lookAfter = 100 * time.Millisecond

// inTime runs do while it alone has the volume, until do returns: if the disk hangs, only one
// thread waits for it, however many calls there are. A panic in do is passed to the caller, unless
// the caller has already given up.
func (v *Volume) inTime(ctx context.Context, do func(context.Context) error) error {
	done, err := v.alone(ctx)
	if err != nil {
		return err
	}
	early, cancel := deadline.Early(ctx)
	answer, panicked := make(chan error, 1), make(chan string, 1)
	go func() {
		defer done()
		defer cancel()
		defer func() {
			if p := recover(); p != nil {
				panicked <- fmt.Sprintf("%v\n%s", p, debug.Stack())
			}
		}()
		answer <- do(early)
		runtime.Gosched() // let the caller run first, then the watch
	}()
	late := make(chan struct{})
	defer context.AfterFunc(early, func() {
		wait := lastWords
		if at, ok := ctx.Deadline(); ok {
			wait = min(wait, time.Until(at)/2)
		}
		time.AfterFunc(wait, func() { close(late) })
	})()
	return v.awaitAnswer(early, answer, panicked, late)
}

// awaitAnswer returns the answer of inTime's do, or an error after late is closed. An answer that
// has come counts, however late this goroutine runs: do's end also ends early, and so closes late.
func (v *Volume) awaitAnswer(early context.Context, answer <-chan error, panicked <-chan string, late <-chan struct{}) error {
	look := time.NewTimer(lookAfter)
	defer look.Stop()
	looked, was := false, uint64(0)
	for {
		select {
		case err := <-answer:
			return err
		case p := <-panicked:
			panic(p)
		case <-look.C:
			looked, was = true, health.Ended(v.Device.Number)
			continue
		case <-late:
		}
		select {
		case err := <-answer:
			return err
		case p := <-panicked:
			panic(p)
		default:
		}
		if !looked {
			return errkind.New(errkind.DeadlineExceeded, "volume %s: not done in time; try again, what has begun continues: %w", v.Mountpoint, context.Cause(early))
		}
		return errkind.New(errkind.DeadlineExceeded, "volume %s: not done in time, %s; try again, what has begun continues: %w", v.Mountpoint, v.since(was), context.Cause(early))
	}
}

func (v *Volume) reachOpen(ctx context.Context, size uint64, do func(context.Context, *growth) error) error {
	g, err := v.open(toGrow)
	if err != nil {
		return err
	}
	defer g.Close()
	if err := v.canReach(g, size); err != nil {
		return err
	}
	return do(ctx, g)
}

// resize implements Resize on a volume that is locked and open. If the disk is still smaller, it
// does the work that has to precede a growth.
func (v *Volume) resize(ctx context.Context, g *growth, size uint64) error {
	device, err := g.room()
	if err != nil {
		return v.growError(err)
	}
	if g.exceeds(size, device) {
		if err := g.fstype.Settle(ctx, g.Mounted); err != nil {
			return v.growError(err)
		}
		return &stillSmaller{g.disk()}
	}
	if goal := g.goal(g.usable(size), device); goal > g.before.Blocks {
		if g.stack != nil && g.fixed() == nil {
			err = g.stack.Grow()
		}
		if err != nil {
			return v.growError(fmt.Errorf("volume %s cannot grow: %w", v.Mountpoint, err))
		}
		return v.grow(ctx, g, goal)
	}
	// An interrupted call, or somebody else, may have grown it.
	if err := g.fstype.Settle(ctx, g.Mounted); err != nil {
		return v.growError(err)
	}
	return nil
}

// canReach refuses a size that the filesystem can never have. It refuses every size if the disk
// ends before the filesystem does.
func (v *Volume) canReach(g *growth, size uint64) error {
	device, err := g.room() // after the filesystem's end was read
	if err != nil {
		return v.growError(err)
	}
	if err := v.refuseFixed(g, size, device); err != nil {
		return err
	}
	size = g.usable(size)
	if !g.before.EndsWithin(device) {
		return errkind.New(errkind.FailedPrecondition, "volume %s cannot grow: %s on %s ends at %d bytes, but its disk has only %d: unmount it, restore the disk's size and content, check it and mount it",
			v.Mountpoint, v.FSType, v.Device.Path, g.before.Bytes(), device)
	}
	goal := g.goal(size, device)
	if size != 0 && size < g.before.Bytes() && g.before.Bytes()-size > g.before.BlockSize && goal < g.before.Blocks {
		return errkind.New(errkind.OutOfRange, "%s on %s ends at %d bytes and never shrinks: %d requested", v.FSType, v.Device.Path, g.before.Bytes(), size)
	}
	return v.growError(g.fstype.CanGrow(g.Mounted, goal))
}

// toGrow and toTrim name what a call does to a volume, after "cannot" in its errors.
const (
	toGrow = "grow"
	toTrim = "be trimmed"
)

// refuseFixed refuses a disk's size that the volume cannot have, because its device is a partition
// or a mapping that does not grow with the disk. Size 0 is that device's end.
func (v *Volume) refuseFixed(g *growth, size, device uint64) error {
	if !g.exceeds(size, device) {
		return nil
	}
	if err := g.fixed(); err != nil {
		return fmt.Errorf("volume %s cannot grow: %w", v.Mountpoint, err)
	}
	part, is := blockdev.PartitionOf("/", v.Device.Number)
	if !is {
		return nil
	}
	return errkind.New(errkind.FailedPrecondition, "volume %s cannot grow to %d bytes: %s is a partition of %s and has %d: grow the partition (growpart, or sfdisk), then the volume with size 0",
		v.Mountpoint, size, v.Device.Path, part.Disk, device)
}

// growth is an open filesystem that can grow. While it is open, the volume cannot be unmounted, so
// its directory cannot become another volume's.
type growth struct {
	filesystem.Mounted
	fstype filesystem.Type
	before filesystem.Geometry
	device blockdev.Device
	stack  *blockdev.Stack // nil unless the device is a mapping
}

// fixed returns why the mappings below the filesystem cannot grow, or nil.
func (g *growth) fixed() error {
	if g.stack == nil {
		return nil
	}
	return g.stack.Fixed
}

// usable returns how much of a disk of size bytes the filesystem's device has; 0 stays 0.
func (g *growth) usable(size uint64) uint64 {
	if g.stack == nil || size == 0 {
		return size
	}
	return max(g.stack.Usable(size), 1)
}

// disk returns the disk that the host grows.
func (g *growth) disk() blockdev.Device {
	if g.stack == nil {
		return g.device
	}
	return g.stack.Disk
}

// room returns the device's size, or the size that its mappings can give it.
func (g *growth) room() (uint64, error) {
	switch {
	case g.stack == nil:
		return blockdev.SizeOf(g.Disk)
	case g.fixed() != nil:
		return g.device.Reach(), nil
	}
	return g.stack.Room()
}

// exceeds reports whether the disk has to become larger for a size, because the device has only the
// given room. A size within the filesystem's last block is reached already.
func (g *growth) exceeds(size, room uint64) bool {
	size = g.usable(size)
	return room < size && size >= g.before.Bytes()+g.before.BlockSize
}

// goal returns the block at which the filesystem is to end for a size in bytes, on a device of
// device bytes; a size of 0 means the end of the device.
func (g *growth) goal(size, device uint64) uint64 {
	if size == 0 {
		size = device
	}
	return g.fstype.Goal(g.before, size/g.before.BlockSize, device/g.before.BlockSize)
}

// open opens the volume to grow or to trim it, or reports why it cannot. Errors that the filesystem
// has recorded forbid both: its record of the free blocks may be wrong.
func (v *Volume) open(to string) (*growth, error) {
	refuse := func(format string, args ...any) (*growth, error) {
		return nil, errkind.New(errkind.FailedPrecondition, "volume %s cannot %s: "+format, append([]any{v.Mountpoint, to}, args...)...)
	}
	if len(v.identity.Devices) > 1 {
		return refuse("%s has several devices, %s, and a request does not say which one grows: grow it by its own program in the guest", v.FSType, strings.Join(v.devices, " and "))
	}
	if v.Device.Path == "" {
		return refuse("%s has no block device below it", v.FSType)
	}
	fstype, ok := filesystem.Lookup(v.FSType)
	if !ok {
		return refuse("%s is not one of %v", v.FSType, filesystem.Names())
	}
	if err := v.refuseInaccessible(to); err != nil {
		return nil, err
	}
	var stack *blockdev.Stack
	if to == toGrow { // a trim needs none
		var err error
		if stack, err = v.stack(); err != nil {
			return nil, err
		}
	}
	// Both files stay open for the whole call, because each open takes as long as a short call.
	v.proven.Again()
	both, err := filesystem.Open(v.Mountpoint, v.Device.Path, &v.proven)
	if err != nil {
		return nil, v.kernelError(to, err)
	}
	g := &growth{Mounted: both, fstype: fstype, device: v.Device, stack: stack}
	count, err := fstype.RecordedErrors(g.Disk)
	if err == nil && count == 0 {
		err = v.check(g.Dir, to)
	}
	if err == nil && count == 0 {
		g.before, err = fstype.Geometry(g.Mounted)
		v.endsAt(g.before.Bytes())
	}
	if err == nil && count == 0 {
		return g, nil
	}
	g.Close()
	if err != nil {
		return nil, v.kernelError(to, err)
	}
	return refuse("the superblock of %s records errors (%d): unmount, run %s on the detached disk and mount it again", v.Device.Path, count, fstype.Faults.Repair)
}

// stack returns the mappings below the volume; nil if there are none. It reads no disk, because a
// suspended mapping does not answer.
func (v *Volume) stack() (*blockdev.Stack, error) {
	if !v.Device.IsMapping() {
		return nil, nil
	}
	s, err := blockdev.StackOf(v.Device)
	if err != nil {
		return nil, v.growError(fmt.Errorf("volume %s cannot grow: %w", v.Mountpoint, err))
	}
	return &s, nil
}

// refuseInaccessible refuses to grow or to trim a volume that cannot be written to or that may have
// lost its end. A slow volume may grow, and so may one that was not probed yet.
func (v *Volume) refuseInaccessible(to string) error {
	if v.watch == nil {
		return nil
	}
	conditions, _ := v.watch.Latest()
	for _, c := range conditions {
		if c.Status == health.Inaccessible || c.Reason == health.ReasonPastDeviceTooSmall {
			return errkind.New(errkind.FailedPrecondition, "volume %s cannot %s: %s", v.Mountpoint, to, c.Message)
		}
	}
	return nil
}

// check refuses a directory that is read-only or no longer this volume's.
func (v *Volume) check(dir *os.File, to string) error {
	if mine, err := v.identity.Has(dir); err != nil {
		return err
	} else if !mine {
		return errkind.New(errkind.NotFound, "volume %s was unmounted meanwhile", v.Mountpoint)
	}
	var all unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &all); err != nil {
		return err
	}
	if all.Flags&unix.ST_RDONLY != 0 {
		return errkind.New(errkind.FailedPrecondition, "volume %s cannot %s: it is mounted read-only", v.Mountpoint, to)
	}
	return nil
}

// repair returns the command that repairs the volume's filesystem on a detached disk.
func (v *Volume) repair() string {
	fstype, _ := filesystem.Lookup(v.FSType)
	return fstype.Faults.Repair
}

// growError gives an error that the kernel returns during a growth its kind.
func (v *Volume) growError(err error) error { return v.kernelError(toGrow, err) }

// kernelError gives an error that the kernel returns during a growth or a trim its kind.
func (v *Volume) kernelError(to string, err error) error {
	refuse := func(kind errkind.Kind, why string) error {
		return errkind.New(kind, "volume %s cannot %s: %s: %w", v.Mountpoint, to, why, err)
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return refuse(errkind.DeadlineExceeded, "its deadline has passed; try again, the growth continues")
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EAGAIN): // from ext4 and from xfs
		return refuse(errkind.DeadlineExceeded, "the kernel is resizing it already; try again")
	case errors.Is(err, unix.EIO): // a new part of the disk may fail alone
		return refuse(errkind.FailedPrecondition, v.Device.Path+" has failed a read or a write, or "+v.FSType+" has stopped after one: repair the disk and call again; if it still fails, unmount and mount the volume")
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.ESHUTDOWN):
		return refuse(errkind.FailedPrecondition, v.FSType+" on "+v.Device.Path+" has stopped after an error: repair the disk, unmount and mount it again")
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, fs.ErrNotExist):
		return refuse(errkind.FailedPrecondition, v.Device.Path+" is gone from under "+v.FSType+": unmount, attach the disk again and mount it")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF): // a device that is just leaving has no bytes any more
		return refuse(errkind.FailedPrecondition, v.Device.Path+" is gone from under "+v.FSType+", or ends before it: unmount, attach or restore the disk and mount it")
	case errors.Is(err, unix.EUCLEAN):
		return refuse(errkind.FailedPrecondition, "the metadata of "+v.FSType+" on "+v.Device.Path+" is damaged: unmount it and check the detached disk")
	case errors.Is(err, unix.EPERM):
		return refuse(errkind.FailedPrecondition, "the kernel refuses it with recorded errors (run "+v.repair()+" on the detached disk) or without CAP_SYS_RESOURCE")
	}
	return err
}

// awaitSize waits until the disk has at least size bytes.
func (v *Volume) awaitSize(ctx context.Context, disk blockdev.Device, size uint64) error {
	has, err := disk.AwaitSize(ctx, size)
	if err != nil && ctx.Err() != nil && !errors.Is(err, fs.ErrNotExist) {
		return refuseSmaller(disk, has, size, err)
	}
	return v.growError(err)
}

// grow grows the filesystem and verifies the result: it may fall short of goal only by blocks that
// the filesystem cannot use.
func (v *Volume) grow(ctx context.Context, g *growth, goal uint64) error {
	bytes := func(blocks uint64) uint64 { return blocks * g.before.BlockSize }
	progress := Progress{From: g.before.Bytes(), Now: g.before.Bytes(), Goal: bytes(goal)}
	g.Step = func(blocks uint64) {
		now := progress
		now.Now = bytes(blocks)
		v.endsAt(now.Now) // also if the growth stops here
		v.grows(&now)
	}
	v.grows(&progress)
	defer v.grows(nil)
	if err := g.fstype.Grow(ctx, g.Mounted, goal); err != nil {
		return v.growError(err)
	}
	after, err := g.fstype.Geometry(g.Mounted)
	if err != nil {
		return v.growError(err)
	}
	v.endsAt(after.Bytes())
	if after.Blocks+after.Slack < goal {
		return errkind.New(errkind.Internal, "%s on %s ends at block %d, not at %d, although the kernel reported success", v.FSType, v.Device.Path, after.Blocks, goal)
	}
	return nil
}
