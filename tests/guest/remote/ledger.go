package remote

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// Ledger is the host's memory of a writer: the sum of every acknowledged block, in order. The guest
// may crash, lie or lose its disk; the blocks in the Ledger were promised, and a later reading is
// compared with them. It is safe for concurrent use.
type Ledger struct {
	blockBytes int
	apart      bool // each block is a separate file

	mu      sync.Mutex
	sums    []uint64
	took    []time.Duration
	changed chan struct{} // closed and replaced with every record
}

// NewLedger returns an empty ledger of blocks of blockBytes each.
func NewLedger(blockBytes int) *Ledger {
	return &Ledger{blockBytes: blockBytes, changed: make(chan struct{})}
}

// First returns a ledger of the first blocks only: those that were acknowledged at an earlier time.
func (l *Ledger) First(blocks uint64) *Ledger {
	sums := l.snapshot()
	n := min(blocks, uint64(len(sums)))
	return &Ledger{blockBytes: l.blockBytes, apart: l.apart, sums: sums[:n:n], changed: make(chan struct{})}
}

// BlockBytes returns the length of a block.
func (l *Ledger) BlockBytes() int { return l.blockBytes }

// Record adds an acknowledgement. It accepts only the next whole block.
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

// Forget drops all blocks except the first ones, of a writer that has ended.
func (l *Ledger) Forget(allBut uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sums = l.sums[:min(allBut, uint64(len(l.sums)))]
}

// Blocks returns the number of acknowledged blocks.
func (l *Ledger) Blocks() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(len(l.sums))
}

// Took returns the duration of each block's write and fsync, by the guest's clock, from the first
// block on.
func (l *Ledger) Took() []time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.took)
}

// Bytes returns the number of acknowledged bytes.
func (l *Ledger) Bytes() uint64 { return l.Blocks() * uint64(l.blockBytes) }

// snapshot returns the sums so far. Record only appends, so the slice stays valid.
func (l *Ledger) snapshot() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sums[:len(l.sums):len(l.sums)]
}

// state returns the number of bytes so far, and a channel that is closed when there are more.
func (l *Ledger) state() (uint64, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(len(l.sums)) * uint64(l.blockBytes), l.changed
}

// Comparison is the result of comparing a reading with the blocks of a Ledger.
type Comparison struct {
	Blocks  uint64   // acknowledged, and therefore expected
	Bytes   uint64   // read back and equal
	Differ  []uint64 // blocks that were read and have other content
	Missing []uint64 // blocks that could not be read: the file ends before them, or reading failed
}

// Err returns nil if every acknowledged block was read back and is equal. Otherwise the error lists
// the other blocks.
func (c Comparison) Err() error {
	if len(c.Differ) == 0 && len(c.Missing) == 0 {
		return nil
	}
	return fmt.Errorf("of %d acknowledged blocks %d differ (%s) and %d are missing (%s)",
		c.Blocks, len(c.Differ), first(c.Differ), len(c.Missing), first(c.Missing))
}

// first formats the first few entries of a list.
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
