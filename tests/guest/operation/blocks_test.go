package operation

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
)

const block = 4096

func start(t *testing.T, c *remote.Client, blocks remote.WriteBlocks) *remote.Writer {
	t.Helper()
	w, err := c.StartWriter(t.Context(), blocks)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestWriterRunsUntilItIsStopped(t *testing.T) {
	c, path := guest(t), filepath.Join(t.TempDir(), "blocks")
	w := start(t, c, remote.WriteBlocks{Path: path, BlockBytes: block, Seed: 1})
	if err := w.Await(t.Context(), 10*block); err != nil {
		t.Fatal(err)
	}
	if err := w.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if want := w.Ledger().Bytes(); uint64(info.Size()) != want {
		t.Errorf("file size: a block was written and not acknowledged, or the other way round\nwant: %d\n got: %d", want, info.Size())
	}
	var calls uint64
	got, err := c.Verify(t.Context(), path, w.Ledger(), func(read, all uint64) {
		calls++
		if read != calls || all != w.Ledger().Blocks() {
			t.Errorf("progress\nwant: %d of %d\n got: %d of %d", calls, w.Ledger().Blocks(), read, all)
		}
	})
	if err := errors.Join(err, got.Err()); err != nil {
		t.Fatal(err)
	}
	if got.Bytes != w.Ledger().Bytes() || calls != got.Blocks {
		t.Errorf("bytes and blocks verified\nwant: %d, %d\n got: %d, %d", w.Ledger().Bytes(), w.Ledger().Blocks(), got.Bytes, calls)
	}
}

func TestWriterEndsAtItsLimit(t *testing.T) {
	c, path := guest(t), filepath.Join(t.TempDir(), "blocks")
	w := start(t, c, remote.WriteBlocks{Path: path, BlockBytes: block, LimitBytes: 3*block + 1})
	if err := w.Err(); err != nil {
		t.Fatal(err)
	}
	if got := w.Ledger().Blocks(); got != 3 {
		t.Errorf("blocks\nwant: 3\n got: %d", got)
	}
	if err := w.Await(t.Context(), 3*block); err != nil {
		t.Errorf("what was reached before the end: %v", err)
	}
	if err := w.Await(t.Context(), 4*block); err == nil {
		t.Error("a writer that has ended is awaited without an error")
	}
	if err := w.Stop(t.Context()); err != nil {
		t.Errorf("stop after the end\nwant: no error, as Err\n got: %v", err)
	}
}

func TestWriterReportsTheBlockThatFailed(t *testing.T) {
	// Every write to /dev/full fails with ENOSPC.
	w := start(t, guest(t), remote.WriteBlocks{Path: "/dev/full", BlockBytes: block})
	err := w.Err()
	failure, ok := errors.AsType[*remote.Error](err)
	if !ok || !errors.Is(err, syscall.ENOSPC) || failure.Index == nil || *failure.Index != 0 {
		t.Errorf("error\nwant: %v at block 0\n got: %v", syscall.ENOSPC, err)
	}
	if got := w.Ledger().Blocks(); got != 0 {
		t.Errorf("blocks acknowledged\nwant: 0\n got: %d", got)
	}
}

func TestNoBlockIsAcknowledgedWithoutFsync(t *testing.T) {
	// /dev/null takes every write and refuses fsync with EINVAL.
	w := start(t, guest(t), remote.WriteBlocks{Path: "/dev/null", BlockBytes: block})
	if err := w.Err(); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("error\nwant: %v\n got: %v", syscall.EINVAL, err)
	}
	if got := w.Ledger().Blocks(); got != 0 {
		t.Errorf("blocks acknowledged\nwant: 0\n got: %d", got)
	}
}

func TestVerifyFindsChangedAndMissingBlocks(t *testing.T) {
	c, path := guest(t), filepath.Join(t.TempDir(), "blocks")
	w := start(t, c, remote.WriteBlocks{Path: path, BlockBytes: block, Seed: 5, LimitBytes: 8 * block})
	if err := w.Err(); err != nil {
		t.Fatal(err)
	}
	damage := errors.Join(
		c.WriteAt(t.Context(), path, 2*block+17, []byte{0}), // a byte
		c.WriteAt(t.Context(), path, 4*block, make([]byte, block)),
		os.Truncate(path, 6*block+100))
	if damage != nil {
		t.Fatal(damage)
	}
	got, err := c.Verify(t.Context(), path, w.Ledger(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := []uint64{2, 4, 6}; !slices.Equal(got.Differ, want) {
		t.Errorf("differ\nwant: %v\n got: %v", want, got.Differ)
	}
	if want := []uint64{7}; !slices.Equal(got.Missing, want) {
		t.Errorf("missing\nwant: %v\n got: %v", want, got.Missing)
	}
	if got.Bytes != 4*block || got.Err() == nil {
		t.Errorf("bytes equal, and an error\nwant: %d\n got: %d, %v", 4*block, got.Bytes, got.Err())
	}
	gone, err := c.Verify(t.Context(), path+".gone", w.Ledger(), nil)
	if !errors.Is(err, syscall.ENOENT) || len(gone.Missing) != 8 {
		t.Errorf("file gone\nwant: %v, 8 missing\n got: %v, %d missing", syscall.ENOENT, err, len(gone.Missing))
	}
}

func TestDetachedWriterOutlivesItsConnection(t *testing.T) {
	c, path := guest(t), filepath.Join(t.TempDir(), "blocks")
	const blocks = 200
	ctx, hangUp := context.WithCancel(t.Context())
	w, err := c.StartWriter(ctx, remote.WriteBlocks{Path: path, BlockBytes: block, Seed: 5, LimitBytes: blocks * block, Detached: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Await(t.Context(), block); err != nil {
		t.Fatal(err)
	}
	hangUp()
	if err := w.Err(); !errors.Is(err, context.Canceled) && err != nil {
		t.Fatal(err)
	}
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for info, err := os.Stat(path); err != nil || info.Size() < blocks*block; info, err = os.Stat(path) {
		select {
		case <-again.C:
		case <-t.Context().Done():
			t.Fatalf("the writer wrote %v, %v", info, err)
		}
	}
}

func TestBlocksApartAreFilesOfTheirOwn(t *testing.T) {
	c, path := guest(t), filepath.Join(t.TempDir(), "blocks")
	w := start(t, c, remote.WriteBlocks{Path: path, BlockBytes: block, Seed: 7, LimitBytes: 8 * block, Apart: true})
	if err := w.Err(); err != nil {
		t.Fatal(err)
	}
	got, err := c.Verify(t.Context(), path, w.Ledger(), nil)
	if err := errors.Join(err, got.Err()); err != nil || got.Bytes != 8*block {
		t.Fatalf("bytes verified\nwant: %d\n got: %d, %v", 8*block, got.Bytes, err)
	}
	damage := errors.Join(
		c.WriteAt(t.Context(), filepath.Join(path, "2", "block"), 17, []byte{0}),
		os.Truncate(filepath.Join(path, "4", "block"), 100),
		os.RemoveAll(filepath.Join(path, "6")))
	if damage != nil {
		t.Fatal(damage)
	}
	if got, err = c.Verify(t.Context(), path, w.Ledger(), nil); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Differ, []uint64{2, 4}) || !slices.Equal(got.Missing, []uint64{6, 7}) {
		t.Errorf("differ, and missing from the first that is not there\nwant: [2 4] [6 7]\n got: %v %v", got.Differ, got.Missing)
	}
	got, err = c.Verify(t.Context(), path, w.Ledger().First(2), nil)
	if err := errors.Join(err, got.Err()); err != nil || got.Blocks != 2 {
		t.Errorf("what was acknowledged first\nwant: 2 blocks\n got: %d, %v", got.Blocks, err)
	}
}
