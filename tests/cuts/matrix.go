package cuts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

const (
	giB = 1 << 30
	tiB = 1 << 40

	// stepLimit is the time limit for one step or one check of a volume, as a base for vm.Limit.
	stepLimit = 3 * time.Minute
	// writtenBlocks is the number of blocks that a volume has before its first growth.
	writtenBlocks = 16
)

// shape is a format of the matrix.
type shape struct {
	name, fstype string
	bytes        uint64 // size at the beginning
	options      []string
	most         uint64 // the largest size that the volume grows to; 0 for no limit
	journalless  bool   // a cut leaves work for e2fsck, which runs before the next mount
}

// matrix are the formats that grow. mkfs.xfs requires 300 MiB or more, and no btrfs below 256 MiB
// is resized.
var matrix = []shape{
	{name: "ext4-4k", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "4096"}},
	{name: "ext4-1k", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "1024"}, most: 40 * giB},
	{name: "ext4-no-resize-inode", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "4096", "-O", "^resize_inode"}},
	{name: "ext4-1k-no-resize-inode", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "1024", "-O", "^resize_inode"}, most: 40 * giB},
	{name: "ext4-bigalloc", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "4096", "-O", "bigalloc"}},
	{name: "ext4-csum-seed", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "4096", "-O", "metadata_csum_seed"}},
	{name: "ext4-orphan-file", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "4096", "-O", "orphan_file"}},
	{name: "ext4-no-64bit", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "4096", "-O", "^64bit"}},
	{name: "ext4-no-journal", fstype: "ext4", bytes: 200 * miB, options: []string{"-b", "4096", "-O", "^has_journal"}, journalless: true},
	{name: "ext3", fstype: "ext3", bytes: 200 * miB, options: []string{"-b", "4096"}, most: 300 * giB},
	{name: "btrfs", fstype: "btrfs", bytes: 256 * miB},
	{name: "xfs", fstype: "xfs", bytes: 304 * miB},
	{name: "xfs-1k", fstype: "xfs", bytes: 304 * miB, options: []string{"-b", "size=1024"}, most: 40 * giB},
	{name: "xfs-no-reflink", fstype: "xfs", bytes: 304 * miB, options: []string{"-m", "reflink=0"}},
	{name: "xfs-no-bigtime", fstype: "xfs", bytes: 304 * miB, options: []string{"-m", "bigtime=0", "-n", "ftype=1"}, most: 300 * giB},
	{name: "xfs-bigtime", fstype: "xfs", bytes: 304 * miB, options: []string{"-m", "bigtime=1", "-n", "ftype=1"}, most: 300 * giB},
}

// named returns the rows of the matrix with these names.
func named(names ...string) (rows []shape) {
	for _, f := range matrix {
		if slices.Contains(names, f.name) {
			rows = append(rows, f)
		}
	}
	return rows
}

// grown is a volume of the matrix.
type grown struct {
	*volume
	shape
	ledger *remote.Ledger // the blocks that it contains
}

// grows makes a volume of each format, and grows all of them to each size in turn. In each step
// QEMU is killed while some of the calls run; then the same calls are made again in a new guest,
// and every volume must have the size, its blocks, no recorded error, and a silent fsck.
func (c *campaign) grows(ctx context.Context, formats []shape, sizes []uint64) (err error) {
	defer func() { err = errors.Join(err, c.end()) }()
	if err := c.begin(ctx); err != nil {
		return err
	}
	var volumes []*grown
	for _, f := range formats {
		v := &grown{shape: f, volume: &volume{disk: disk{way: ways["agent"], id: f.name, fstype: f.fstype}, options: f.options, size: f.bytes}}
		if v.path, err = vm.Scratch(ctx, c.dir, f.fstype, int64(f.bytes), f.options...); err != nil {
			return err
		}
		volumes = append(volumes, v)
	}
	for _, size := range sizes {
		volumes = slices.DeleteFunc(volumes, func(v *grown) bool { return v.most > 0 && size > v.most })
		if volumes, err = c.growStep(ctx, volumes, size); err != nil {
			return fmt.Errorf("to %d: %w", size, err)
		}
	}
	return nil
}

// growStep grows all volumes to a size, with a kill. It returns the volumes that can grow on.
func (c *campaign) growStep(ctx context.Context, volumes []*grown, size uint64) (intact []*grown, err error) {
	for _, v := range volumes {
		if err := within(ctx, func(ctx context.Context) error { return v.start(ctx, c) }); err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.id, err)
		}
	}
	began := time.Now()
	failed := c.killInStep(ctx, volumes, size)
	if err := c.boot(ctx); err != nil {
		return nil, err
	}
	c.cut++
	left := map[*grown]*remains{}
	var at []string
	for _, v := range volumes {
		r, where, err := v.left(size)
		if err != nil {
			return nil, err
		}
		at = append(at, v.id+" "+where)
		left[v] = r
		if err := failed[v]; err != nil {
			c.lose(r, finding{duringUse, err})
		}
	}
	c.say("to %d bytes: the step took %.1f s; in the superblocks after the kill: %s", size, time.Since(began).Seconds(), strings.Join(at, "; "))
	for _, v := range volumes {
		began := time.Now()
		found, err := c.again(ctx, v, left[v])
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.id, err)
		}
		c.say("%s: the same call and the checks took %.1f s", v.id, time.Since(began).Seconds())
		if len(found) == 0 {
			v.volume.size = size
			intact = append(intact, v)
		}
	}
	return intact, nil
}

// start attaches and mounts a volume. A new volume gets its blocks.
func (v *grown) start(ctx context.Context, c *campaign) error {
	v.guest = c.guest
	if err := errors.Join(v.attach(ctx), v.mount(ctx)); err != nil || v.ledger != nil {
		return err
	}
	writer, err := c.guest.Remote.StartWriter(ctx, remote.WriteBlocks{Path: v.mounted + "/" + written, BlockBytes: blockBytes, LimitBytes: writtenBlocks * blockBytes, Apart: true})
	if err != nil {
		return err
	}
	<-writer.Done()
	v.ledger = writer.Ledger()
	return writer.Err()
}

// killInStep grows all volumes at once, and kills the guest when a number of them, chosen by the
// seed, have been grown; if that is none, when a disk has its new size. It returns the errors of
// volumes that failed before the kill.
func (c *campaign) killInStep(ctx context.Context, volumes []*grown, size uint64) map[*grown]error {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(stepLimit))
	defer cancel()
	type answer struct {
		*grown
		err error
	}
	answers := make(chan answer, len(volumes))
	for _, v := range volumes {
		go func() { answers <- answer{v, v.grow(ctx, size)} }()
	}
	failed := map[*grown]error{}
	first := c.random.IntN(len(volumes))
	for range first {
		if a := <-answers; a.err != nil {
			failed[a.grown] = a.err
		}
	}
	if first == 0 {
		_ = vm.Again(ctx, func() (bool, error) { // ctx's end also ends the calls
			return slices.ContainsFunc(volumes, func(v *grown) bool {
				info, err := os.Stat(v.path)
				return err == nil && uint64(info.Size()) == size
			}), nil
		})
	}
	c.guest.Kill()
	succeeded := first - len(failed)
	for range len(volumes) - first {
		if a := <-answers; a.err == nil {
			succeeded++
		}
	}
	c.say("%d of %d calls had succeeded before the kill", succeeded, len(volumes))
	return failed
}

// left returns what a kill has left of a volume, and where in the growth it was.
func (v *grown) left(size uint64) (r *remains, where string, err error) {
	has, err := vm.SizeOnDisk(v.fstype, v.path)
	if err != nil {
		return nil, "", err
	}
	switch {
	case has <= v.volume.size:
		where = "before"
	case has < size:
		where = fmt.Sprintf("at %d", has)
	default:
		where = "after"
	}
	return &remains{
		volume: v.volume, kind: kill, path: v.path, how: "QEMU was killed", ledger: v.ledger,
		growths: 1, window: has <= v.volume.size, goal: size,
	}, where, nil
}

// again makes the interrupted call again and checks the volume. If something is lost, it keeps the
// image as the kill left it.
func (c *campaign) again(ctx context.Context, v *grown, r *remains) (found []finding, err error) {
	if err := vm.CopySparse(r.untouched(), r.path); err != nil {
		return nil, err
	}
	defer os.Remove(r.untouched())
	if v.journalless {
		if _, err := vm.Repair(ctx, r.path); err != nil {
			c.say("%s: e2fsck -p is not enough, so e2fsck -fy decides: %v", v.id, err)
			if err := vm.RepairAll(ctx, r.path); err != nil {
				return nil, err
			}
		}
	}
	check := func(ctx context.Context) error {
		c.disks++
		found, err = r.check(ctx, c.guest, ways["agent"], fmt.Sprintf("c%d", c.disks))
		return err
	}
	if err := within(ctx, check); err != nil {
		return nil, err
	}
	if len(found) == 1 && found[0].loss == metWindow {
		c.say("%s: %v", v.id, found[0].err)
		whole, err := c.rescueAll(ctx, []*remains{r})
		if err != nil || len(whole) == 0 {
			return found, err
		}
		if err := within(ctx, check); err != nil {
			return nil, err
		}
	}
	if len(found) == 0 && strings.HasPrefix(v.fstype, "ext") {
		found, err = checkCopies(ctx, r)
	}
	for _, f := range found {
		c.lose(r, f)
	}
	if len(found) > 0 {
		err = errors.Join(err, c.keepUntouched(r))
	}
	return found, err
}

// checkCopies checks the copies of an ext4's superblock, and that it has recorded no error.
func checkCopies(ctx context.Context, r *remains) (found []finding, err error) {
	recorded, err := vm.ErrorsOnDisk(r.path)
	if err != nil {
		return nil, err
	}
	if recorded > 0 {
		found = append(found, finding{unclean, fmt.Errorf("its superblock records %d errors", recorded)})
	}
	if err := vm.CheckBackups(ctx, r.path); err != nil {
		found = append(found, finding{unclean, err})
	}
	return found, nil
}

func within(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(stepLimit))
	defer cancel()
	return do(ctx)
}
