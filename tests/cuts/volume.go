package cuts

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
)

const (
	miB = 1 << 20

	// blockBytes is small, so that the writer acknowledges many blocks in little time and an
	// emulated guest reads them back quickly.
	blockBytes = 16 << 10
	// maxGrowths is the maximum number of growths of one volume.
	maxGrowths = 48
	// minStep is one whole group of an ext4 with blocks of 1 KiB, so that each growth adds at least
	// one group.
	minStep, maxStep = 8 * miB, 120 * miB
)

// format is a kind of volume, with other options in each round if it has several.
type format struct {
	fstype  string
	bytes   uint64
	options [][]string
	mapped  bool // on a linear mapping of the device-mapper, behind keptBytes of the disk
}

// mapped is the set of formats that need the device-mapper.
const mapped = "mapped"

// formats are the formats of the volumes, by the name of their set: the four kinds of a set in
// turn.
var formats = map[string][]format{
	"usual": {
		{fstype: "ext4", bytes: 64 * miB, options: [][]string{{"-b", "1024"}}},
		{fstype: "xfs", bytes: 304 * miB, options: [][]string{nil}},
		{fstype: "ext4", bytes: 64 * miB, options: [][]string{{"-b", "4096"}, {"-b", "4096", "-O", "^resize_inode"}, {"-b", "2048"}, {"-b", "4096", "-O", "^metadata_csum"}}},
		{fstype: "xfs", bytes: 304 * miB, options: [][]string{{"-m", "rmapbt=1"}, {"-b", "size=1024"}, {"-i", "sparse=0"}, {"-m", "reflink=0,bigtime=0"}}},
	},
	"others": {
		{fstype: "btrfs", bytes: 256 * miB, options: [][]string{nil}},
		{fstype: "ext3", bytes: 64 * miB, options: [][]string{{"-b", "1024"}, {"-b", "2048"}}},
		{fstype: "btrfs", bytes: 256 * miB, options: [][]string{{"-m", "single"}, {"--mixed"}, {"--csum", "xxhash"}, {"-n", "4096"}}},
		{fstype: "ext3", bytes: 64 * miB, options: [][]string{{"-b", "4096"}, {"-b", "4096", "-O", "^resize_inode"}}},
	},
	mapped: {
		{fstype: "ext4", bytes: 64 * miB, options: [][]string{{"-b", "1024"}, {"-b", "4096"}}, mapped: true},
	},
}

// volume is a volume that grows under its writer until the power cut.
type volume struct {
	disk
	options []string
	seed    uint64
	before  string // a copy of the image, made when the record began
	record  string // the record of its writes
	writer  *remote.Writer

	unsynced uint64 // number of bytes that a second writer writes without syncing them

	mu      sync.Mutex
	size    uint64 // the requested size of the disk
	growths []growth
	acked   []acked
}

// growth is a growth that has begun.
type growth struct {
	from, to uint64
	at       int64 // length of the record at its beginning
}

// acked is the number of acknowledged blocks at a moment.
type acked struct {
	blocks uint64
	at     int64 // length of the record shortly after the last of these blocks was acknowledged
}

// newVolume formats the volume with a number, in dir, and keeps a copy of its image.
func newVolume(ctx context.Context, dir string, number int, format format, random *rand.Rand) (*volume, error) {
	v := &volume{
		disk: disk{id: fmt.Sprintf("v%d", number), fstype: format.fstype},
		seed: random.Uint64(), size: format.bytes,
		options:  format.options[random.IntN(len(format.options))],
		unsynced: random.Uint64N(2) * format.bytes / 8,
	}
	var err error
	if v.path, err = vm.Scratch(ctx, dir, v.fstype, int64(v.size), v.options...); err != nil {
		return nil, err
	}
	if format.mapped {
		v.size += keptBytes
		v.kept = keptBytes
		if err := shift(v.path, keptBytes); err != nil {
			return nil, err
		}
	}
	v.before, v.record = filepath.Join(dir, v.id+".before"), filepath.Join(dir, v.id+".record")
	return v, vm.CopySparse(v.before, v.path)
}

// begin attaches the volume to a guest, with a record, mounts it and starts its writer.
func (v *volume) begin(ctx context.Context, g *vm.Guest, w way) error {
	v.guest, v.way = g, w
	if err := v.attach(ctx); err != nil {
		return err
	}
	if err := g.Record(ctx, v.diskID(), v.record); err != nil {
		return err
	}
	if err := v.mount(ctx); err != nil {
		return fmt.Errorf("mount it new: %w", err)
	}
	// Data that was written and not synced lies in the page cache, and the kernel writes it out at
	// the worst time: it allocates space for it in the middle of a growth.
	if v.unsynced > 0 {
		_, err := g.Remote.StartWriter(context.WithoutCancel(ctx), remote.WriteBlocks{Path: v.mounted + "/unsynced", BlockBytes: blockBytes, LimitBytes: v.unsynced, Unsynced: true, Apart: true})
		if err != nil {
			return err
		}
	}
	var err error
	v.writer, err = g.Remote.StartWriter(context.WithoutCancel(ctx), remote.WriteBlocks{Path: v.mounted + "/" + written, BlockBytes: blockBytes, Seed: v.seed, Apart: true})
	return err
}

// written is the name of the directory that a volume's writer fills.
const written = "written"

// recorded returns the length of the record.
func (v *volume) recorded() (int64, error) {
	info, err := os.Stat(v.record)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// note records which blocks are acknowledged, until the writer ends.
func (v *volume) note(ctx context.Context) error {
	for blocks := uint64(0); ; {
		ended := v.writer.Await(ctx, (blocks+1)*blockBytes)
		blocks = v.writer.Ledger().Blocks()
		at, err := v.recorded() // must come after the blocks are counted
		if err != nil {
			return err
		}
		v.mu.Lock()
		v.acked = append(v.acked, acked{blocks, at})
		v.mu.Unlock()
		if ended != nil {
			return ctx.Err()
		}
	}
}

// keepGrowing grows the volume again and again, each time after the writer has acknowledged some
// more blocks.
func (v *volume) keepGrowing(ctx context.Context, random *rand.Rand) error {
	for range maxGrowths {
		if err := v.writer.Await(ctx, v.writer.Ledger().Bytes()+(1+random.Uint64N(16))*blockBytes); err != nil {
			return err
		}
		at, err := v.recorded()
		if err != nil {
			return err
		}
		step := minStep + random.Uint64N((maxStep-minStep)/miB+1)*miB
		v.mu.Lock()
		g := growth{from: v.size, to: v.size + step, at: at}
		v.size = g.to
		v.growths = append(v.growths, g)
		v.mu.Unlock()
		if err := v.grow(ctx, g.to); err != nil {
			return fmt.Errorf("grow from %d to %d: %w", g.from, g.to, err)
		}
	}
	return nil
}

// remove removes the volume's files on the host.
func (v *volume) remove() {
	for _, path := range []string{v.path, v.before, v.record} {
		_ = os.Remove(path)
	}
}
