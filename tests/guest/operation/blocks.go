package operation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/directvol/directvol/tests/guest/remote"
)

// blockSize returns a valid block size: whole sectors, within the protocol's bound.
func blockSize(asked int) (int, error) {
	switch {
	case asked == 0:
		return remote.DefaultBlock, nil
	case asked < 0 || asked > remote.MaxBlock || asked%512 != 0:
		return 0, fmt.Errorf("block size %d: want a multiple of 512, at most %d", asked, remote.MaxBlock)
	default:
		return asked, nil
	}
}

// writeBlocks is the checksummed writer. It emits a block only after fsync has returned success for
// it.
func writeBlocks(ctx context.Context, args remote.WriteBlocks, emit func(remote.Block) error) error {
	size, err := blockSize(args.BlockBytes)
	if err != nil {
		return err
	}
	to, err := create(args)
	if err != nil {
		return err
	}
	defer to.Close()
	if err := syncDirectory(filepath.Dir(args.Path)); err != nil {
		return err
	}
	block := make([]byte, size)
	for index := uint64(0); args.Detached || ctx.Err() == nil; index++ {
		if args.LimitBytes > 0 && (index+1)*uint64(size) > args.LimitBytes {
			return nil
		}
		remote.Fill(block, args.Seed, index)
		began := time.Now()
		if err := to.write(index, block); err != nil {
			return atBlock(index, err)
		}
		took := time.Since(began).Nanoseconds()
		if err := emit(remote.Block{Index: index, Bytes: size, Sum: remote.Sum(index, block), Nanoseconds: took}); err != nil && !args.Detached {
			return err
		}
	}
	return nil
}

// verifyBlocks reads block after block and emits each, until the last one asked for or the first
// missing one.
func verifyBlocks(ctx context.Context, args remote.VerifyBlocks, emit func(remote.Block) error) error {
	size, err := blockSize(args.BlockBytes)
	if err != nil {
		return err
	}
	from, err := open(args)
	if err != nil {
		return err
	}
	defer from.Close()
	block := make([]byte, size)
	for i := uint64(0); i < args.Count && ctx.Err() == nil; i++ {
		index := args.From + i
		n, err := from.read(index, block)
		if err != nil && !errors.Is(err, io.EOF) {
			return atBlock(index, err)
		}
		if n == 0 {
			return nil
		}
		if err := emit(remote.Block{Index: index, Bytes: n, Sum: remote.Sum(index, block[:n])}); err != nil {
			return err
		}
	}
	return nil
}
