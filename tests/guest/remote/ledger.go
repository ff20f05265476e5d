package remote

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// Ledger is what the host remembers of a writer: the sum of every block that was acknowledged, in order. The guest may crash, lie or lose its disk: what stands here was
// promised, and is what a later reading is compared with. It is safe for concurrent use.
type Ledger struct {
	blockBytes int
	apart      bool // each block is a file of its own

	mu      sync.Mutex
	sums    []uint64
	took    []time.Duration
	changed chan struct{} // closed and replaced with every record
}

// NewLedger returns an empty ledger of blocks of blockBytes each.
func NewLedger(blockBytes int) *Ledger {
	return &Ledger{blockBytes: blockBytes, changed: make(chan struct{})}
}

// First returns a ledger of the first blocks alone: what was acknowledged at an earlier time.
func (l *Ledger) First(blocks uint64) *Ledger {
	sums := l.snapshot()
	n := min(blocks, uint64(len(sums)))
	return &Ledger{blockBytes: l.blockBytes, apart: l.apart, sums: sums[:n:n], changed: make(chan struct{})}
}

// BlockBytes is the length of a block.
func (l *Ledger) BlockBytes() int { return l.blockBytes }

// Record adds an acknowledgement. It refuses any other than that of the next whole block.
func (l *Ledger) Record(b Block) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if next := uint64(len(l.sums)); b.Index != next || b.Bytes != l.blockBytes {
		return fmt.Errorf("acknowledgement of block %d with %d bytes, where block %d with %d bytes comes next", b.Index, b.Bytes, next, l.blockBytes)
	}
	l.sums = append(l.sums, b.Sum)
	l.took = append(l.took, time.Duration(b.Nanoseconds))
	close(l.changed)
	l.changed = make(chan struct{})
	return nil
}

// Forget drops all but the first blocks, of a writer that has ended.
func (l *Ledger) Forget(allBut uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sums = l.sums[:min(allBut, uint64(len(l.sums)))]
}

// Blocks is the number of blocks that were acknowledged.
func (l *Ledger) Blocks() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(len(l.sums))
}

// Took is how long each block's write and fsync took, by the guest's clock, from the first block on.
func (l *Ledger) Took() []time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.took)
}

// Bytes is how much was acknowledged.
func (l *Ledger) Bytes() uint64 { return l.Blocks() * uint64(l.blockBytes) }

// snapshot returns the sums so far. Records only append, so the slice stays valid.
func (l *Ledger) snapshot() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sums[:len(l.sums):len(l.sums)]
}

// state returns the bytes so far, and a channel that is closed when there are more.
func (l *Ledger) state() (uint64, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(len(l.sums)) * uint64(l.blockBytes), l.changed
}

// Comparison is what a reading found of the blocks that a Ledger holds.
type Comparison struct {
	Blocks  uint64   // acknowledged, and so expected
	Bytes   uint64   // read back and equal
	Differ  []uint64 // blocks read whose content is another
	Missing []uint64 // blocks that could not be read: the file ends before them, or reading failed
}

// Err is nil where every acknowledged block was read back and equal, and otherwise says which were not.
func (c Comparison) Err() error {
	if len(c.Differ) == 0 && len(c.Missing) == 0 {
		return nil
	}
	return fmt.Errorf("of %d acknowledged blocks %d differ (%s) and %d are missing (%s)",
		c.Blocks, len(c.Differ), first(c.Differ), len(c.Missing), first(c.Missing))
}

// first shows the first few of a list.
func first(blocks []uint64) string {
	switch {
	case len(blocks) == 0:
		return "none"
	case len(blocks) > 8:
		return fmt.Sprintf("%v …", blocks[:8])
	default:
		return fmt.Sprint(blocks)
	}
}
