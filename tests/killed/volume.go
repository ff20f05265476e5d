package killed

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

const (
	miB = 1 << 20

	// blockBytes is small, so that many blocks are acknowledged in little time.
	blockBytes = 16 << 10
	// maxGrowths is the maximum number of growths of one volume.
	maxGrowths       = 48
	minStep, maxStep = 8 * miB, 120 * miB
)

// formats are the formats of the volumes, with options of mkfs.
var formats = map[string]struct {
	bytes   uint64
	options [][]string
}{
	"btrfs": {256 * miB, [][]string{nil, {"-m", "single"}}},
	"ext3":  {64 * miB, [][]string{{"-b", "1024"}, {"-b", "4096"}}},
	"ext4":  {64 * miB, [][]string{{"-b", "1024"}, {"-b", "4096"}}},
	"xfs":   {304 * miB, [][]string{nil, {"-m", "rmapbt=1"}}},
}

// sets are the types of filesystem of a campaign's volumes, in turn.
var sets = map[string][]string{"usual": {"ext4", "xfs"}, "others": {"btrfs", "ext3"}}

// volume is a volume of a round.
type volume struct {
	sandbox.Volume
	size    uint64 // the last requested size of its disk
	grown   uint64 // the last acknowledged size
	growths int    // the number of acknowledged growths
	written []*written
	path    string // the mount point
}

// written is a file of a writer.
type written struct {
	name   string
	writer *remote.Writer
}

func newVolume(ctx context.Context, dir, id, fstype string, random *rand.Rand) (*volume, error) {
	format := formats[fstype]
	image, err := vm.Scratch(ctx, dir, fstype, int64(format.bytes), format.options[random.IntN(len(format.options))]...)
	if err != nil {
		return nil, err
	}
	return &volume{Volume: sandbox.Volume{ID: id, Path: image, FSType: fstype}, size: format.bytes}, nil
}

// write starts a writer, which ends at a limit if that is not 0.
func (v *volume) write(ctx context.Context, g *guest, seed, limit uint64) (*written, error) {
	w := &written{name: fmt.Sprintf("written-%d", len(v.written))}
	var err error
	w.writer, err = g.remote.StartWriter(ctx, remote.WriteBlocks{Path: v.path + "/" + w.name, BlockBytes: blockBytes, Seed: seed, LimitBytes: limit, Apart: seed%2 == 0})
	if err != nil {
		return nil, fmt.Errorf("write to %s: %w", v.ID, err)
	}
	v.written = append(v.written, w)
	return w, nil
}

// blocks returns the number of acknowledged blocks.
func (v *volume) blocks() (n uint64) {
	for _, w := range v.written {
		n += w.writer.Ledger().Blocks()
	}
	return n
}

// verify reads every acknowledged block.
func (v *volume) verify(ctx context.Context, g *guest) error {
	for _, w := range v.written {
		if w.writer.Ledger().Blocks() == 0 {
			continue // the file may not exist
		}
		found, err := g.remote.Verify(ctx, v.path+"/"+w.name, w.writer.Ledger(), nil)
		if err == nil {
			err = found.Err()
		}
		if err != nil {
			return fmt.Errorf("%w: volume %s (%s), %s: %w", errLost, v.ID, v.FSType, w.name, err)
		}
	}
	return nil
}

// locked reports whether a process of this host holds a lock on the volume's image.
func (v *volume) locked() (bool, error) {
	var stat unix.Stat_t
	if err := unix.Stat(v.Path, &stat); err != nil {
		return false, err
	}
	locks, err := os.ReadFile("/proc/locks")
	return locksInode(string(locks), stat), err
}
