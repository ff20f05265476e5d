package operation

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/directvol/directvol/tests/guest/act"
)

// operation runs to its end, or until ctx asks it to stop, and emits its results.
type operation func(ctx context.Context, args json.RawMessage, emit func(any) error) error

// operations is all a test guest can do.
var operations = map[string]operation{
	act.OpExec:         once(execute),
	act.OpReadFile:     once(readFile),
	act.OpWriteFile:    plain(writeFile),
	act.OpStat:         once(stat),
	act.OpStatFS:       once(statFS),
	act.OpDeviceSize:   once(deviceSize),
	act.OpMkdir:        plain(mkdir),
	act.OpMount:        plain(mount),
	act.OpUnmount:      plain(unmount),
	act.OpShutdownFS:   plain(shutdownFS),
	act.OpGrowFS:       once(growFS),
	act.OpFreezeFS:     plain(freezeFS),
	act.OpSync:         plain(sync),
	act.OpWriteBlocks:  many(writeBlocks),
	act.OpVerifyBlocks: many(verifyBlocks),
	act.OpDialVsock:    once(dialVsock),
	act.OpSignal:       once(signal),
	act.OpThreads:      once(threads),
}

// many makes an operation of a function that emits results of type R as it goes.
func many[A, R any](do func(context.Context, A, func(R) error) error) operation {
	return func(ctx context.Context, raw json.RawMessage, emit func(any) error) error {
		var args A
		if err := json.Unmarshal(raw, &args); err != nil {
			return fmt.Errorf("decode the arguments: %w", err)
		}
		return do(ctx, args, func(r R) error { return emit(r) })
	}
}

// once makes an operation of a function with one result.
func once[A, R any](do func(context.Context, A) (R, error)) operation {
	return many(func(ctx context.Context, args A, emit func(R) error) error {
		result, err := do(ctx, args)
		if err != nil {
			return err
		}
		return emit(result)
	})
}

// plain makes an operation of a function without a result.
func plain[A any](do func(A) error) operation {
	return many(func(_ context.Context, args A, _ func(struct{}) error) error { return do(args) })
}
