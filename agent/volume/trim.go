package volume

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/errkind"
)

// Trim tells the disk of the volume at path which blocks of its filesystem are free, and returns
// how many bytes that are. Free ranges that are shorter than least, in bytes, are left out. A disk
// that takes no discards is FailedPrecondition. An xfs frees the blocks of removed files in the
// background: those that it has not freed yet are left for the next trim.
//
// The volume is locked, and its watch paused, for one range at a time. A btrfs has only one range,
// which the kernel trims to its end even if the caller gives up:
//
//	twice at once    the second call waits for the first, and then trims what was freed since
//	late, given up   it ends between two ranges; the error says how much was given back
//	beside a growth  each waits for the other's step; the new end is trimmed too
//	an unmount       comes between two ranges; the error is NotFound
//	after a restart  nothing is remembered: ext4 itself skips what is trimmed
func (t *Table) Trim(ctx context.Context, path string, least uint64) (trimmed uint64, err error) {
	v, err := t.Lookup(path)
	if err != nil {
		return 0, err
	}
	early, cancel := deadline.Early(ctx)
	defer cancel()
	done, err := t.trims.Take(early, v.Device.Path)
	if err != nil {
		return 0, errkind.New(errkind.DeadlineExceeded, "volume %s: another trim has not ended; try again: %w", v.Mountpoint, context.Cause(early))
	}
	defer done()
	// Blocks whose removal is not on the disk yet are not free: without this, a trim right after a
	// removal would miss them.
	if err := t.Flush(ctx, v.Mountpoint); err != nil {
		return 0, err
	}
	for at, ended := uint64(0), false; !ended; {
		step, err := t.trimStep(ctx, v, at, least)
		trimmed += step.trimmed
		if err != nil && trimmed > 0 {
			err = errkind.New(errkind.Of(err), "%d bytes were given back before: %w", trimmed, err)
		}
		if err != nil {
			return trimmed, err
		}
		at, ended = step.next, step.ended
	}
	return trimmed, nil
}

// Trimmed returns how many bytes the trims of all volumes have given back.
func (t *Table) Trimmed() uint64 { return t.trimmed.Load() }

// trimmedStep is the result of a trim of one range. The next range begins at next.
type trimmedStep struct {
	trimmed, next uint64
	ended         bool
}

// trimStep trims the range of a volume that begins at from.
func (t *Table) trimStep(ctx context.Context, v *Volume, from, least uint64) (trimmedStep, error) {
	steps := make(chan trimmedStep, 1)
	err := v.inTime(ctx, func(ctx context.Context) error {
		if ctx.Err() != nil {
			return errkind.New(errkind.DeadlineExceeded, "volume %s: not trimmed to its end in time; try again: %w", v.Mountpoint, context.Cause(ctx))
		}
		g, err := v.open(toTrim)
		if err != nil {
			return err
		}
		defer g.Close()
		trimmed, next, err := g.fstype.Trim(g.Mounted, g.before, from, least)
		if err != nil {
			return v.trimError(least, err)
		}
		t.trimmed.Add(trimmed)
		steps <- trimmedStep{trimmed, next, next >= g.before.Bytes()}
		return nil
	})
	if err != nil {
		return trimmedStep{}, err
	}
	return <-steps, nil
}

// trimError gives an error that the kernel returns for a trim its kind.
func (v *Volume) trimError(least uint64, err error) error {
	refuse := func(kind errkind.Kind, why string) error {
		return errkind.New(kind, "volume %s cannot %s: %s: %w", v.Mountpoint, toTrim, why, err)
	}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		return refuse(errkind.FailedPrecondition, v.Device.Path+" takes no discards: attach it with discard=unmap on the host, on storage that can free blocks")
	case errors.Is(err, unix.EINVAL) && least > 0:
		return refuse(errkind.InvalidArgument, "no free range can be as long as least_bytes")
	case errors.Is(err, unix.EINVAL):
		return refuse(errkind.FailedPrecondition, v.Device.Path+" frees only ranges that are longer than any of "+v.FSType)
	case errors.Is(err, unix.EPERM):
		return refuse(errkind.FailedPrecondition, "the agent has no CAP_SYS_ADMIN")
	}
	return v.kernelError(toTrim, err)
}
