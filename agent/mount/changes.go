package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Changes counts the changes of this process's mounts, so that a caller need not check a mount
// again before the next change. The zero value is ready; it counts while Follow runs.
//
// The kernel wakes Follow at each change (proc(5) on poll of mountinfo), so that a change is
// counted a moment after it was made.
type Changes struct {
	count    atomic.Uint64
	followed atomic.Bool

	mu   sync.Mutex
	next chan struct{} // closed at the next change; nil if nobody waits
}

// Next returns a channel that is closed at the next change. A caller obtains it before it looks at
// the mounts, so that it misses none.
func (c *Changes) Next() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next == nil {
		c.next = make(chan struct{})
	}
	return c.next
}

// changed counts a change.
func (c *Changes) changed() {
	c.count.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
}

// Now returns the number of changes so far, or 0 while Follow does not run.
func (c *Changes) Now() uint64 {
	if c == nil || !c.followed.Load() {
		return 0
	}
	return c.count.Load()
}

// Follow counts until ctx ends. It returns ctx's error, or the reason why mounts cannot be
// followed.
func (c *Changes) Follow(ctx context.Context) error {
	// As All reads it: /proc/self is the first thread's, which may have another namespace.
	file, err := os.Open("/proc/thread-self/mountinfo")
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
			// An event after this point ends the wait. An earlier one may have been missed.
			c.changed()
			c.followed.Store(true)
			waited = true
			return false
		})
		if err != nil {
			return errors.Join(ctx.Err(), err)
		}
	}
}
