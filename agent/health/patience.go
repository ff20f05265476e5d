package health

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Patient returns a context that ends when ctx does, or when no disk for which meant returns true
// has ended a request for silence. So a caller waits for a slow disk as long as the disk ends
// requests. meant is called each second, with each dev_t. If the kernel's counts cannot be read, no
// request counts as ended.
func Patient(ctx context.Context, silence time.Duration, meant func(device uint64) bool) (context.Context, context.CancelFunc) {
	return patient(ctx, silence, meant, func() map[uint64]counts {
		text, _ := os.ReadFile(diskStats)
		return parseDiskStats(string(text))
	})
}

func patient(ctx context.Context, silence time.Duration, meant func(uint64) bool, read func() map[uint64]counts) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	last, came := read(), time.Now()
	go func() {
		again := time.NewTicker(min(beatInterval, silence))
		defer again.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-again.C:
			}
			now := read()
			for device, c := range now {
				if meant(device) && c.ended() != last[device].ended() {
					came = time.Now()
				}
			}
			last = now
			if time.Since(came) >= silence {
				cancel(fmt.Errorf("no disk has completed a request for %v", silence))
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// AnyDisk makes Patient consider all disks.
func AnyDisk(uint64) bool { return true }

// Ended returns how many requests a block device has ended so far, or 0 if it is gone. It does not
// access the disk.
func Ended(device uint64) uint64 {
	text, _ := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(device), unix.Minor(device)))
	c, _ := parseCounts(strings.Fields(string(text)))
	return c.ended()
}
