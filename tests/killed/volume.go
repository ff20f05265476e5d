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

	// blockBytes is small, so that much is acknowledged in little time.
	blockBytes = 16 << 10
	// maxGrowths bounds what one volume is grown.
	maxGrowths       = 48
	minStep, maxStep = 8 * miB, 120 * miB
)

// formats are what volumes are made as, with options of mkfs.
var formats = map[string]struct {
	bytes   uint64
	options [][]string
}{
	"ext4": {64 * miB, [][]string{{"-b", "1024"}, {"-b", "4096"}}},
	"xfs":  {304 * miB, [][]string{nil, {"-m", "rmapbt=1"}}},
}

// volume is one in a round.
type volume struct {
	sandbox.Volume
	size    uint64 // that its disk was asked to have
	grown   uint64 // the last size that was acknowledged
	growths int    // that were
	written []*written
	path    string // where it is mounted
}

// written is what a writer wrote.
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

// write starts a writer, which ends at a limit, where that is not 0.
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

// blocks is how many were acknowledged.
func (v *volume) blocks() (n uint64) {
	for _, w := range v.written {
		n += w.writer.Ledger().Blocks()
	}
	return n
}

// verify reads every block that was acknowledged.
func (v *volume) verify(ctx context.Context, g *guest) error {
	for _, w := range v.written {
		if w.writer.Ledger().Blocks() == 0 {
			continue // its file may not be there
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
