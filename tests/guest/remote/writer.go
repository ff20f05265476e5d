package remote

import (
	"cmp"
	"context"
	"errors"
	"fmt"
)

// Writer is a checksummed writer that runs in the guest. Its Ledger records every acknowledgement.
type Writer struct {
	session *session
	ledger  *Ledger
	done    chan struct{}
	err     error // valid once done is closed
}

// StartWriter starts a writer, which runs until its limit, until Stop, until an error, or until ctx
// ends.
func (c *Client) StartWriter(ctx context.Context, blocks WriteBlocks) (*Writer, error) {
	if blocks.BlockBytes == 0 {
		blocks.BlockBytes = DefaultBlock
	}
	s, err := c.begin(ctx, OpWriteBlocks, blocks)
	if err != nil {
		return nil, err
	}
	w := &Writer{session: s, ledger: NewLedger(blocks.BlockBytes), done: make(chan struct{})}
	w.ledger.apart = blocks.Apart
	go w.record()
	return w, nil
}

// record records acknowledgements until the writer ends.
func (w *Writer) record() {
	defer close(w.done)
	defer w.session.end()
	for {
		var block Block
		done, err := w.session.next(&block)
		if err == nil && !done {
			err = w.ledger.Record(block)
		}
		if err != nil || done {
			w.err = err
			return
		}
	}
}

// Ledger returns the blocks acknowledged so far. It stays valid after the writer's end.
func (w *Writer) Ledger() *Ledger { return w.ledger }

// Done is closed when the writer has ended.
func (w *Writer) Done() <-chan struct{} { return w.done }

// Err waits for the writer's end and returns the reason: nil if the writer reached its limit or was
// stopped.
func (w *Writer) Err() error {
	<-w.done
	return w.err
}

// Stop lets the writer finish the block in flight, waits for its end, and returns the same as Err.
// A writer on a hanging disk does not end; Stop then returns when ctx ends.
func (w *Writer) Stop(ctx context.Context) error {
	// If sending fails, the connection has ended, and the writer with it. Err has the better
	// reason.
	_ = w.session.send(Request{Op: OpStop})
	select {
	case <-w.done:
		return w.err
	case <-ctx.Done():
		return fmt.Errorf("stop the writer: its block %d is still in flight: %w", w.ledger.Blocks(), context.Cause(ctx))
	}
}

// errEarly is the error of a wait for a writer that ended without an error, but too early.
var errEarly = errors.New("it reached its limit")

// Await waits until the writer has acknowledged this many bytes since its start. It fails if the
// writer ends earlier.
func (w *Writer) Await(ctx context.Context, bytes uint64) error {
	for {
		have, changed := w.ledger.state()
		if have >= bytes {
			return nil
		}
		select {
		case <-changed:
		case <-w.done:
			if have, _ := w.ledger.state(); have >= bytes {
				return nil
			}
			return fmt.Errorf("the writer ended at %d of the %d bytes awaited: %w", w.ledger.Bytes(), bytes, cmp.Or(w.err, errEarly))
		case <-ctx.Done():
			return fmt.Errorf("the writer acknowledged %d of the %d bytes awaited: %w", have, bytes, context.Cause(ctx))
		}
	}
}

// Verify reads the blocks of the ledger back and compares them. The caller must unmount and mount
// the volume first, so that Verify reads the disk and not the page cache. If reading fails, Verify
// returns the error and a Comparison of the blocks read so far. progress, unless nil, is called
// after each block with the number of blocks read and the number of all blocks.
func (c *Client) Verify(ctx context.Context, path string, ledger *Ledger, progress func(read, all uint64)) (Comparison, error) {
	sums := ledger.snapshot()
	found := Comparison{Blocks: uint64(len(sums))}
	s, err := c.begin(ctx, OpVerifyBlocks, VerifyBlocks{Path: path, BlockBytes: ledger.blockBytes, Count: found.Blocks, Apart: ledger.apart})
	if err != nil {
		found.missingFrom(0)
		return found, err
	}
	defer s.end()
	for next := uint64(0); ; next++ {
		var block Block
		done, err := s.next(&block)
		if err == nil && !done && (block.Index != next || next == found.Blocks) {
			err = fmt.Errorf("%s: the guest answers for block %d where %d of %d comes next", s.op, block.Index, next, found.Blocks)
		}
		if err != nil || done {
			found.missingFrom(next)
			return found, err
		}
		if block.Sum == sums[next] && block.Bytes == ledger.blockBytes {
			found.Bytes += uint64(block.Bytes)
		} else {
			found.Differ = append(found.Differ, next)
		}
		if progress != nil {
			progress(next+1, found.Blocks)
		}
	}
}

// missingFrom counts all blocks from next on as missing.
func (c *Comparison) missingFrom(next uint64) {
	for ; next < c.Blocks; next++ {
		c.Missing = append(c.Missing, next)
	}
}
