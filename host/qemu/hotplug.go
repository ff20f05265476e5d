package qemu

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrHotplugHeld is the failure of a call for one disk while the guest does not let go of another: it works off its queue of
// hotplug events one by one (ACPI's), so a disk that was added now would not be seen, and one that was removed would stay.
var ErrHotplugHeld = errors.New("the guest does not let go of another disk, and no disk comes or goes until it does")

// diskEvents are the QMP events that concern disks.
var diskEvents = []string{"DEVICE_DELETED", "DEVICE_UNPLUG_GUEST_ERROR"}

// hotplug lets disks come and go one at a time, in the order of their callers: with 20 disks at a time, two removals under way,
// or an addition beside a removal, made one of 18 mounts fail, and took disks that nobody had asked for.
type hotplug struct {
	turn chan struct{} // holds a token while a disk is added, or until one has left

	mu      sync.Mutex
	leaving *disk     // that the guest was asked to let go of, nil where it has answered
	since   time.Time // when it was asked first
}

func newHotplug() *hotplug { return &hotplug{turn: make(chan struct{}, 1)} }

// take waits for the turn of a disk, and until the guest has let go of the last one, up to hotplugLimit. done may be called twice.
func (h *hotplug) take(ctx context.Context, d *disk) (done func(), err error) {
	select {
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, h.held(d, fmt.Errorf("wait for other disks to come or go: %w", ctx.Err()))
	}
	done = sync.OnceFunc(func() { <-h.turn })
	other := h.other(d)
	if other == nil {
		return done, nil
	}
	limit := time.NewTimer(h.left(other))
	defer limit.Stop()
	select {
	case <-other.gone:
		return done, nil
	case <-limit.C:
		err = errors.New("it had time enough")
	case <-ctx.Done():
		err = ctx.Err()
	}
	done()
	return nil, h.held(d, err)
}

// other returns the disk that the guest was asked to let go of and has not, unless it is d.
func (h *hotplug) other(d *disk) *disk {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving == nil || h.leaving == d || h.leaving.isGone() {
		return nil
	}
	return h.leaving
}

// held says which disk holds others up, where one does.
func (h *hotplug) held(d *disk, err error) error {
	other := h.other(d)
	if other == nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return fmt.Errorf("%w: disk %s (%s), since %v: %w", ErrHotplugHeld, other.ID, other.Path, time.Since(h.since).Round(time.Second), err)
}

// asks notes that the guest is asked to let go of a disk.
func (h *hotplug) asks(d *disk) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving != d {
		h.leaving, h.since = d, time.Now()
	}
}

// over notes that a disk stays.
func (h *hotplug) over(d *disk) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving == d {
		h.leaving = nil
	}
}

// left is for how long others still wait for a disk.
func (h *hotplug) left(d *disk) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving != d {
		return hotplugLimit
	}
	return max(0, time.Until(h.since.Add(hotplugLimit)))
}
