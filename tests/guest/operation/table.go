package operation

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/directvol/directvol/tests/guest/remote"
)

// operation runs until it is done, or until ctx asks it to stop, and emits its results.
type operation func(ctx context.Context, args json.RawMessage, emit func(any) error) error

// operations are all operations of a test guest.
var operations = map[string]operation{
	remote.OpExec:         once(execute),
	remote.OpReadFile:     once(readFile),
	remote.OpWriteFile:    plain(writeFile),
	remote.OpStat:         once(stat),
	remote.OpStatFS:       once(statFS),
	remote.OpDeviceSize:   once(deviceSize),
	remote.OpDiskOffset:   once(diskOffset),
	remote.OpMkdir:        plain(mkdir),
	remote.OpMount:        plain(mount),
	remote.OpUnmount:      plain(unmount),
	remote.OpShutdownFS:   plain(shutdownFS),
	remote.OpGrowFS:       once(growFS),
	remote.OpFreezeFS:     plain(freezeFS),
	remote.OpSync:         plain(sync),
	remote.OpWriteBlocks:  many(writeBlocks),
	remote.OpVerifyBlocks: many(verifyBlocks),
	remote.OpDialVsock:    once(dialVsock),
	remote.OpSignal:       once(signal),
	remote.OpThreads:      once(threads),
	remote.OpClock:        once(clock),
}

// many makes an operation from a function that emits results of type R as it runs.
func many[A, R any](do func(context.Context, A, func(R) error) error) operation {
	return func(ctx context.Context, raw json.RawMessage, emit func(any) error) error {
		var args A
		if err := json.Unmarshal(raw, &args); err != nil {
			return fmt.Errorf("decode the arguments: %w", err)
		}
		return do(ctx, args, func(r R) error { return emit(r) })
	}
}

// once makes an operation from a function with one result.
func once[A, R any](do func(context.Context, A) (R, error)) operation {
	return many(func(ctx context.Context, args A, emit func(R) error) error {
		result, err := do(ctx, args)
		if err != nil {
			return err
		}
		return emit(result)
	})
}

// plain makes an operation from a function without a result.
func plain[A any](do func(A) error) operation {
	return many(func(_ context.Context, args A, _ func(struct{}) error) error { return do(args) })
}
