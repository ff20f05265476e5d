package health

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Patient waits for a slow disk as long as the disk ends requests, and until the caller's deadline.
// Requests of other disks do not count.
func TestWaitEndsWhenTheDiskIsSilent(t *testing.T) {
	const slow, other, silence = 1, 2, 5 * time.Second
	for name, test := range map[string]struct {
		every, until, want time.Duration // the time between two ends of requests, that of the last end, and that of the context's end
	}{
		"slow":               {4 * time.Second, 60 * time.Second, 65 * time.Second},
		"nothing comes":      {time.Hour, time.Hour, 5 * time.Second},
		"stops":              {time.Second, 7 * time.Second, 12 * time.Second},
		"the caller is gone": {time.Second, time.Hour, 100 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				read := func() map[uint64]counts {
					return map[uint64]counts{
						slow:  {writes: uint64(min(time.Since(began), test.until) / test.every), inFlight: 1},
						other: {reads: uint64(time.Since(began))},
					}
				}
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
				defer cancel()
				ctx, end := patient(ctx, silence, func(device uint64) bool { return device == slow }, read)
				defer end()
				<-ctx.Done()
				if got := time.Since(began); got < test.want-beatInterval || got > test.want+beatInterval {
					t.Errorf("want it to end after %v\ngot  %v: %v", test.want, got, context.Cause(ctx))
				}
			})
		})
	}
}

func TestWaitReadsTheKernelsCounts(t *testing.T) {
	ctx, cancel := Patient(t.Context(), time.Millisecond, func(uint64) bool { return false })
	defer cancel()
	<-ctx.Done()
	if t.Context().Err() != nil || context.Cause(ctx) == context.Canceled {
		t.Errorf("want it to end by silence\ngot  %v", context.Cause(ctx))
	}
}
