package rescue

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/directvol/directvol/host/fsck"
)

// Correction describes a new size that was written into the primary superblock of an xfs.
type Correction struct {
	// FromBytes is the filesystem's size before. ToBytes is the size that is proven to be in its
	// log.
	FromBytes uint64 `json:"from_bytes"`
	ToBytes   uint64 `json:"to_bytes"`
	// WroteBytes is the size that was written last for recovery to begin with: an intermediate
	// size, or ToBytes.
	WroteBytes uint64 `json:"wrote_bytes"`
	// Group is the allocation group whose superblock proves ToBytes.
	Group uint64 `json:"group"`
	// PutBack is true if the mount failed nevertheless and the old superblock was restored.
	PutBack bool `json:"put_back"`
	// LeftAs says why the superblock was not restored after a failed mount; "" if it was restored
	// or the mount succeeded.
	LeftAs string `json:"left_as,omitempty"`
}

// String describes the present content of the superblock.
func (c Correction) String() string {
	text := fmt.Sprintf("its superblock was changed from %d to %d bytes", c.FromBytes, c.WroteBytes)
	switch {
	case c.PutBack:
		return text + ", and the old one was put back"
	case c.LeftAs != "":
		return text + ", and was left so: " + c.LeftAs
	default:
		return text
	}
}

// mount makes VMs mount and unmount the disk. Each attempt is a new VM, with nothing cached from
// the previous VM.
func (r *rescue) mount(ctx context.Context) error {
	err := r.tries(ctx)
	switch {
	case isUnclean(err) && r.found.fstype == "xfs":
		err = r.mountGrown(ctx, err)
	case isUnclean(err) && r.found.fstype == "ext4" && r.found.replays:
		err = r.mountReplayed(ctx, err)
	}
	return r.corrected(r.wayOut(err))
}

// corrected adds to an error what was written into the superblock, if anything was, because the
// reader must know it.
func (r *rescue) corrected(err error) error {
	if err == nil || r.report.Superblock == nil {
		return err
	}
	return fmt.Errorf("%w\n%v", err, r.report.Superblock)
}

// mountReplayed is the last attempt for an ext4 whose mount is refused and whose journal must still
// be replayed. The kernel checks the group descriptors before it replays the journal
// (ext4_check_descriptors, fs/ext4/super.c). If a power cut left a growth in the superblock, and
// its group descriptors only in the journal, the kernel refuses every mount. e2fsck replays the
// journal first, and loses nothing.
func (r *rescue) mountReplayed(ctx context.Context, refused error) error {
	err := r.step(ctx, "replay its journal with e2fsck -p", func() (string, error) { return r.replay(ctx) })
	if err != nil {
		return r.andThen(ctx, refused, err)
	}
	return r.tries(ctx)
}

// replay runs e2fsck -p. e2fsck opens a block device exclusively, so replay must give up its own
// exclusive opening meanwhile. There are two gaps, before e2fsck opens the device and after it
// closes it, and perhaps a third, because e2fsck reopens the device after the replay. If something
// mounts the device in a gap, e2fsck notices and gives up, or taking the device back fails. As
// always, a program that opens the device without a lock and not exclusively is not stopped. QEMU
// is excluded all the time, because e2fsck inherits the locks.
func (r *rescue) replay(ctx context.Context) (_ string, err error) {
	if err := r.reclaim(ctx); err != nil {
		return "", err
	}
	r.disk.Yield()
	defer func() {
		if takeErr := r.disk.Take(); takeErr != nil {
			err = errors.Join(err, takeErr)
		}
	}()
	if _, err := r.look(ctx, nil); err != nil {
		return "", err
	}
	r.phase = inReplay
	limited, cancel := r.limited(ctx)
	defer cancel()
	run, err := fsck.RepairFile(limited, r.Disk, r.disk.File())
	r.report.Replay = &run
	if err != nil {
		return "", err
	}
	r.phase = betweenVMs
	r.tried = fmt.Sprintf("%s exits %d, but the mount is still refused", run.Command, run.Exit)
	_, err = r.look(ctx, nil)
	return fmt.Sprintf("it exits %d", run.Exit), err
}

// tries makes a VM mount the disk. If the mount is refused, but the attempt has increased the size
// in the superblock, tries makes one more attempt: recovery writes what it has recovered even if it
// fails later, and the next mount begins with the new size.
func (r *rescue) tries(ctx context.Context) error {
	if r.found.fstype != "xfs" {
		return r.attempt(ctx)
	}
	before, err := readPrimary(r.disk.File())
	if err != nil {
		return r.attempt(ctx) // the kernel decides whether the superblock is valid
	}
	refused := r.attempt(ctx)
	if !isRefusal(refused) {
		return refused
	}
	var after superblock
	err = r.step(ctx, "read its superblock again", func() (_ string, err error) {
		if err := r.reclaim(ctx); err != nil {
			return "", err
		}
		after, err = readPrimary(r.disk.File())
		switch {
		case err != nil:
			return "", err
		case after.blocks > before.blocks:
			return fmt.Sprintf("it changed from %d to %d bytes: another attempt may succeed", before.bytes(), after.bytes()), nil
		default:
			return fmt.Sprintf("it has %d bytes, as before", after.bytes()), nil
		}
	})
	if err != nil {
		return r.andThen(ctx, refused, err)
	}
	if after.blocks <= before.blocks {
		return refused
	}
	return r.attempt(ctx)
}

// andThen returns the error for a refused mount after which something else failed.
func (r *rescue) andThen(ctx context.Context, refused, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("%w; and then: %w", refused, err)
}

// reclaim takes the disk back from a VM that has ended, and checks that nothing else uses it.
func (r *rescue) reclaim(ctx context.Context) error {
	r.phase = betweenVMs
	if err := r.takeBack(); err != nil {
		return err
	}
	_, err := r.look(ctx, nil)
	return err
}

// mountGrown is the last attempt for an xfs whose mount is refused. If a growth is proven,
// mountGrown writes into the primary superblock a size with which the recovery of the log can
// begin, and mounts again.
//
// It writes one sector, which a disk writes atomically, and changes only the size in it. So the
// disk has either the old size, or one from which recovery reaches the size in the log. The sector
// is on the disk before a VM starts that might read it. Unless the mount succeeds, the old sector
// is restored after that VM has ended. So no log is recovered with one size and interrupted with
// another. The log itself stays unchanged until a recovery has succeeded. The old sector is
// restored only over a sector that mountGrown has written, because a sector that recovery has
// written is newer.
//
// Ctrl-C also restores the old sector. SIGKILL and a power failure of this host do not: the larger
// size then stays, and another rescue begins with it. Most logs can be recovered from that size. A
// log that contains an older superblock, with fewer groups, may be refused ("Shrinking AG count in
// log recovery not supported").
func (r *rescue) mountGrown(ctx context.Context, refused error) error {
	g, why := r.prove(ctx)
	if why != nil {
		if ctx.Err() != nil {
			return why
		}
		r.tried = "its superblock was left as it is: " + why.Error()
		return refused
	}
	last, err := g.primary.sector, refused
	var written [][]byte
	for _, start := range g.starts {
		sector := g.sector(start)
		written = append(written, sector)
		if why := r.correct(ctx, g, start, last, sector); why != nil {
			err = r.andThen(ctx, err, why)
			break
		}
		last = sector
		if err = r.tries(ctx); err == nil {
			return r.reached(g)
		}
		if !isUnclean(err) || !mayLeadBeyond(r.said) || !r.holds(last) {
			break
		}
	}
	if r.report.Superblock != nil {
		r.putBack(ctx, g, written)
	}
	return err
}

// prove determines the size to which an xfs has grown.
func (r *rescue) prove(ctx context.Context) (g growth, err error) {
	err = r.step(ctx, "look for what it has grown to", func() (string, error) {
		if !mayLeadBeyond(r.said) {
			return "", errors.New("the kernel reports neither a log that reaches beyond the size in the superblock nor wrong metadata, the signs of a growth that was cut off")
		}
		size, err := r.disk.File().Seek(0, io.SeekEnd) // also works for a block device
		if err != nil {
			return "", err
		}
		if g, err = provenGrowth(ctx, r.disk.File(), uint64(size)); err != nil {
			return "", err
		}
		return fmt.Sprintf("from %d to %d bytes, according to the superblock of group %d", g.primary.bytes(), g.proven.bytes(), g.group), nil
	})
	return g, err
}

// mayLeadBeyond reports whether the kernel log has a message that appears when an xfs's log, or a
// block written out already, refers to space beyond the size in the superblock. The same messages
// appear for other damage.
func mayLeadBeyond(log []string) bool {
	return slices.ContainsFunc(log, func(line string) bool {
		return slices.ContainsFunc(beyond, func(words string) bool { return strings.Contains(line, words) })
	})
}

// beyond lists these messages: for a change to a block in the new space (xfs_buf_map_verify,
// fs/xfs/xfs_buf.c), and for a block in the old space that refers to an inode or a block in the new
// space, most often a directory's (xfs_dir_ino_validate in __xfs_dir3_data_check, fs/xfs/libxfs).
var beyond = []string{"out of range, EOFS", "Metadata corruption detected"}

// correct writes the primary superblock with the size start.
func (r *rescue) correct(ctx context.Context, g growth, start extent, old, sector []byte) error {
	c := &Correction{FromBytes: g.primary.bytes(), ToBytes: g.proven.bytes(), WroteBytes: start.blocks * g.primary.blockBytes, Group: g.group}
	return r.step(ctx, "set a larger size for the recovery", func() (string, error) {
		// The disk is claimed again, because here this host itself writes.
		if err := r.reclaim(ctx); err != nil {
			return "", err
		}
		if !r.holds(old) {
			return "", errors.New("its superblock has changed since it was read")
		}
		r.report.Superblock = c
		r.tried = fmt.Sprintf("its log has a growth from %d to %d bytes, but the kernel did not recover it with the larger size in the superblock either", c.FromBytes, c.ToBytes)
		if err := writeSector(r.disk.File(), sector); err != nil {
			return "", errors.Join(err, writeSector(r.disk.File(), old))
		}
		return fmt.Sprintf("%d instead of %d bytes in its superblock", c.WroteBytes, c.FromBytes), nil
	})
}

// holds reports whether the disk begins with a sector.
func (r *rescue) holds(sector []byte) bool {
	now := make([]byte, len(sector))
	_, err := r.disk.File().ReadAt(now, 0)
	return err == nil && bytes.Equal(now, sector)
}

// putBackLimit limits putBack, which continues after a Ctrl-C.
const putBackLimit = 20 * time.Second

// putBack undoes correct after a failed mount, unless something else has written the superblock
// since. The report records the outcome.
func (r *rescue) putBack(ctx context.Context, g growth, written [][]byte) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), putBackLimit)
	defer cancel()
	c := r.report.Superblock
	err := r.step(ctx, "put its superblock back", func() (string, error) {
		phase := r.phase
		defer func() { r.phase = phase }() // keeps the phase that was interrupted
		if err := r.reclaim(ctx); err != nil {
			return "", err
		}
		now := make([]byte, len(g.primary.sector))
		if _, err := r.disk.File().ReadAt(now, 0); err != nil {
			return "", err
		}
		ours := func(sector []byte) bool { return bytes.Equal(now, sector) }
		if !ours(g.primary.sector) && !slices.ContainsFunc(written, ours) {
			c.LeftAs = "the recovery has changed it since"
			return "left as it is: " + c.LeftAs, nil
		}
		// The old sector is written even if the read returned it, because cached data may not be on
		// the disk.
		if err := writeSector(r.disk.File(), g.primary.sector); err != nil {
			return "", err
		}
		c.PutBack = true
		return fmt.Sprintf("%d bytes", g.primary.bytes()), nil
	})
	if err != nil {
		c.LeftAs = fmt.Sprintf("it could not be put back: %v", err)
	}
}

// reached checks the size that recovery must end with according to provenGrowth.
func (r *rescue) reached(g growth) error {
	now, err := readPrimary(r.disk.File())
	if err == nil && now.blocks < g.proven.blocks {
		err = fmt.Errorf("it has %d bytes, and the superblock of group %d had %d: copy the disk before you do anything else", now.bytes(), g.group, g.proven.bytes())
	}
	if err != nil {
		return fmt.Errorf("disk %s was mounted and unmounted, but: %w", r.Disk, err)
	}
	return nil
}

// writeSector writes a disk's first sector and flushes it to the disk.
func writeSector(disk *os.File, sector []byte) error {
	if _, err := disk.WriteAt(sector, 0); err != nil {
		return fmt.Errorf("write its superblock: %w", err)
	}
	if err := disk.Sync(); err != nil {
		return fmt.Errorf("flush its superblock: %w", err)
	}
	return nil
}
