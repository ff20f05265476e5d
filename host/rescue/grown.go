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

// Correction is a size that was written into the primary superblock of an xfs.
type Correction struct {
	// FromBytes is the filesystem's size before, and ToBytes is the size that is
	// proven to be in its log.
	FromBytes uint64 `json:"from_bytes"`
	ToBytes   uint64 `json:"to_bytes"`
	// WroteBytes is the size that was written last, for recovery to begin with: one
	// in between, or ToBytes.
	WroteBytes uint64 `json:"wrote_bytes"`
	// Group is the allocation group whose superblock proves ToBytes.
	Group uint64 `json:"group"`
	// PutBack is set where the mount has not succeeded all the same, and the superblock
	// is again what it was.
	PutBack bool `json:"put_back"`
	// LeftAs says why the superblock was not put back after a mount that has not
	// succeeded, "" where it was.
	LeftAs string `json:"left_as,omitempty"`
}

// String says of a correction what the disk has now.
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

// mount has the disk mounted and unmounted by VMs, each a new one that knows nothing
// of what the one before it has read.
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

// corrected adds to an error what was written into the superblock, if anything was:
// who reads the error has to know of it.
func (r *rescue) corrected(err error) error {
	if err == nil || r.report.Superblock == nil {
		return err
	}
	return fmt.Errorf("%w\n%v", err, r.report.Superblock)
}

// mountReplayed is the last that is tried with an ext4 whose mount is refused, and
// whose journal is still to be replayed. The kernel checks the group descriptors
// before it replays (ext4_check_descriptors, fs/ext4/super.c): where a cut has left
// the superblock with a growth, and the descriptors that go with it in the journal
// alone, it refuses for ever. e2fsck replays first, and loses nothing.
func (r *rescue) mountReplayed(ctx context.Context, refused error) error {
	err := r.step(ctx, "have e2fsck -p replay its journal", func() (string, error) { return r.replay(ctx) })
	if err != nil {
		return r.andThen(ctx, refused, err)
	}
	return r.tries(ctx)
}

// replay runs e2fsck -p, which opens a block device exclusively and so wants nobody
// else to have it so. Between our claim and e2fsck's there are two moments, before it
// opens the device and after it closes it, and perhaps one in between: it opens the
// device again after the replay. A mount that comes in one of them is seen by e2fsck,
// which gives up, or by us when we take the device back. A program that opens it
// without a lock and not exclusively may come at any time, as ever. QEMU is kept out
// throughout: e2fsck inherits our locks.
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
	r.tried = fmt.Sprintf("%s exits %d, and it was refused all the same", run.Command, run.Exit)
	_, err = r.look(ctx, nil)
	return fmt.Sprintf("it exits %d", run.Exit), err
}

// tries has a VM mount the disk. What is refused is tried once more where the
// attempt itself has brought the superblock on: recovery writes what it has recovered
// also where it fails later on, and the next one begins with the new size.
func (r *rescue) tries(ctx context.Context) error {
	if r.found.fstype != "xfs" {
		return r.attempt(ctx)
	}
	before, err := readPrimary(r.disk.File())
	if err != nil {
		return r.attempt(ctx) // it is for the kernel to judge
	}
	refused := r.attempt(ctx)
	if !isRefusal(refused) {
		return refused
	}
	var after superblock
	err = r.step(ctx, "see what became of its superblock", func() (_ string, err error) {
		if err := r.reclaim(ctx); err != nil {
			return "", err
		}
		after, err = readPrimary(r.disk.File())
		switch {
		case err != nil:
			return "", err
		case after.blocks > before.blocks:
			return fmt.Sprintf("it went from %d to %d bytes: that is worth another attempt", before.bytes(), after.bytes()), nil
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

// andThen is a refusal after which something else went wrong.
func (r *rescue) andThen(ctx context.Context, refused, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("%w; and then: %w", refused, err)
}

// reclaim takes the disk back from a VM that has ended.
func (r *rescue) reclaim(ctx context.Context) error {
	r.phase = betweenVMs
	if err := r.takeBack(); err != nil {
		return err
	}
	_, err := r.look(ctx, nil)
	return err
}

// mountGrown is the last that is tried with an xfs whose mount is refused: if it is
// proven that it has grown, its primary superblock is given the size with which the
// recovery of its log can begin.
//
// One sector is written, which a disk writes whole, and in it the size alone: the old
// one, or one from which recovery comes to the size in the log. It is on the disk
// before a VM is started that might read it, and is put back after that VM has ended,
// unless the mount has succeeded: so no log is recovered with one size and cut off
// with another. The log itself stays as it was until a recovery has succeeded. The old
// sector is put back only over what was written here, for what the recovery has
// written is newer.
//
// A Ctrl-C puts it back too. SIGKILL and a power failure of this host do not: then the
// larger size is there, and another rescue begins with that. Most logs are recovered
// from it; one that has an older superblock, with fewer groups, may be refused
// ("Shrinking AG count in log recovery not supported").
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

// prove finds out what size an xfs has grown to.
func (r *rescue) prove(ctx context.Context) (g growth, err error) {
	err = r.step(ctx, "look for what it has grown to", func() (string, error) {
		if !mayLeadBeyond(r.said) {
			return "", errors.New("the kernel does not say that its log leads beyond the size in it, nor that it finds metadata wrong, which is how a growth that was cut off shows")
		}
		size, err := r.disk.File().Seek(0, io.SeekEnd) // of a block device too
		if err != nil {
			return "", err
		}
		if g, err = provenGrowth(ctx, r.disk.File(), uint64(size)); err != nil {
			return "", err
		}
		return fmt.Sprintf("from %d to %d bytes, as the superblock of group %d has it", g.primary.bytes(), g.proven.bytes(), g.group), nil
	})
	return g, err
}

// mayLeadBeyond reports whether a kernel has said what it says of an xfs whose log, or
// what was written out already, leads beyond the size in its superblock. Of other
// damage it says the same.
func mayLeadBeyond(log []string) bool {
	return slices.ContainsFunc(log, func(line string) bool {
		return slices.ContainsFunc(beyond, func(words string) bool { return strings.Contains(line, words) })
	})
}

// beyond are those words: of a change to a block in the new space (xfs_buf_map_verify,
// fs/xfs/xfs_buf.c), and of a block in the old one that names an inode or a block in the
// new, most often a directory's (xfs_dir_ino_validate in __xfs_dir3_data_check,
// fs/xfs/libxfs).
var beyond = []string{"out of range, EOFS", "Metadata corruption detected"}

// correct writes the primary superblock with a size to begin with.
func (r *rescue) correct(ctx context.Context, g growth, start extent, old, sector []byte) error {
	c := &Correction{FromBytes: g.primary.bytes(), ToBytes: g.proven.bytes(), WroteBytes: start.blocks * g.primary.blockBytes, Group: g.group}
	return r.step(ctx, "let recovery begin with a larger size", func() (string, error) {
		// Once more: here the host itself writes.
		if err := r.reclaim(ctx); err != nil {
			return "", err
		}
		if !r.holds(old) {
			return "", errors.New("its superblock has changed since it was read")
		}
		r.report.Superblock = c
		r.tried = fmt.Sprintf("its log was found to have grown it from %d to %d bytes, and it was not recovered with a superblock that says so either", c.FromBytes, c.ToBytes)
		if err := writeSector(r.disk.File(), sector); err != nil {
			return "", errors.Join(err, writeSector(r.disk.File(), old))
		}
		return fmt.Sprintf("%d instead of %d bytes in its superblock", c.WroteBytes, c.FromBytes), nil
	})
}

// holds reports whether a disk begins with a sector.
func (r *rescue) holds(sector []byte) bool {
	now := make([]byte, len(sector))
	_, err := r.disk.File().ReadAt(now, 0)
	return err == nil && bytes.Equal(now, sector)
}

// putBackLimit is for putBack, which a Ctrl-C does not keep from its work.
const putBackLimit = 20 * time.Second

// putBack undoes correct after a mount that has not succeeded, where nobody has
// written the superblock since. The report says what has become of it.
func (r *rescue) putBack(ctx context.Context, g growth, written [][]byte) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), putBackLimit)
	defer cancel()
	c := r.report.Superblock
	err := r.step(ctx, "put its superblock back", func() (string, error) {
		phase := r.phase
		defer func() { r.phase = phase }() // of what was interrupted
		if err := r.reclaim(ctx); err != nil {
			return "", err
		}
		now := make([]byte, len(g.primary.sector))
		if _, err := r.disk.File().ReadAt(now, 0); err != nil {
			return "", err
		}
		ours := func(sector []byte) bool { return bytes.Equal(now, sector) }
		if !ours(g.primary.sector) && !slices.ContainsFunc(written, ours) {
			c.LeftAs = "the recovery has written it since"
			return "left as it is: " + c.LeftAs, nil
		}
		// Also where it is read as it was: what is cached may not be on the disk.
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

// reached makes sure of what provenGrowth says recovery ends with.
func (r *rescue) reached(g growth) error {
	now, err := readPrimary(r.disk.File())
	if err == nil && now.blocks < g.proven.blocks {
		err = fmt.Errorf("it has %d bytes, and the superblock of group %d had %d: copy the disk before anything else is done to it", now.bytes(), g.group, g.proven.bytes())
	}
	if err != nil {
		return fmt.Errorf("disk %s was mounted and unmounted, but: %w", r.Disk, err)
	}
	return nil
}

// writeSector writes a disk's first sector, and has it on the disk when it returns.
func writeSector(disk *os.File, sector []byte) error {
	if _, err := disk.WriteAt(sector, 0); err != nil {
		return fmt.Errorf("write its superblock: %w", err)
	}
	if err := disk.Sync(); err != nil {
		return fmt.Errorf("write its superblock out: %w", err)
	}
	return nil
}
