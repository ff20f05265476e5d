package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
)

// Changes counts the changes of this process's mounts: what was looked at need not be looked
// at again before the next one. The zero value is ready; it counts while Follow runs.
//
// The kernel wakes Follow at each change (proc(5) on poll of mountinfo), which therefore
// counts one a moment after it was made.
type Changes struct {
	count    atomic.Uint64
	followed atomic.Bool
}

// Now returns how many changes there were, and 0 while nobody counts.
func (c *Changes) Now() uint64 {
	if c == nil || !c.followed.Load() {
		return 0
	}
	return c.count.Load()
}

// Follow counts until ctx ends, and returns its error, or why the mounts cannot be followed.
func (c *Changes) Follow(ctx context.Context) error {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("follow mounts: %w", err)
	}
	defer file.Close()
	if err := file.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("follow mounts: %s cannot be polled: %w", file.Name(), err)
	}
	defer context.AfterFunc(ctx, func() { file.SetReadDeadline(time.Unix(1, 0)) })()
	raw, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("follow mounts: %w", err)
	}
	defer c.followed.Store(false)
	for {
		waited := false
		err := raw.Read(func(uintptr) bool {
			if waited {
				return true
			}
			// An event from here on ends the wait. One before may have gone by unheard.
			c.count.Add(1)
			c.followed.Store(true)
			waited = true
			return false
		})
		if err != nil {
			return errors.Join(ctx.Err(), err)
		}
	}
}
