package qemu

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/directvol/directvol/host/qmp"
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
	ask  asker

	mu      sync.Mutex
	leaving *disk     // that the guest was asked to let go of last
	since   time.Time // when it was asked first
	last    time.Time // when it was asked last
}

// asker asks the guest again to let go of a disk, where it may, and notes that (hotplug.asks).
type asker func(ctx context.Context, d *disk) (gone bool, err error)

func newHotplug(ask asker) *hotplug { return &hotplug{turn: make(chan struct{}, 1), ask: ask} }

// take waits for the turn of a disk, and until the guest has let go of the last one, up to hotplugLimit. done may be called twice.
func (h *hotplug) take(ctx context.Context, d *disk) (done func(), err error) {
	select {
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, h.held(d, fmt.Errorf("wait for other disks to come or go: %w", ctx.Err()))
	}
	done = sync.OnceFunc(func() { <-h.turn })
	if err := h.awaitOther(ctx, d); err != nil {
		done()
		return nil, h.held(d, err)
	}
	return done, nil
}

// awaitOther waits until the guest has let go of the disk that it was asked for, or has refused. It asks again whenever nobody has
// for askAgain, as whoever asked before may have given up, and a guest that boots misses what it is asked: so long it always has to
// obey, also when the disk had its time.
func (h *hotplug) awaitOther(ctx context.Context, d *disk) error {
	var limit <-chan time.Time
	for {
		other := h.other(d)
		if other == nil {
			return nil
		}
		refused := other.refusal()
		if h.other(d) == nil { // it was refused just now
			return nil
		}
		if h.untilAgain() == 0 {
			answer := new(qmp.Error)
			if _, err := h.ask(ctx, other); err != nil && !errors.As(err, &answer) {
				return err
			}
		}
		if limit == nil {
			limit = time.After(max(h.left(other), h.untilAgain()))
		}
		if err := awaitOne(ctx, other, refused, h.untilAgain(), limit); err != nil {
			return err
		}
	}
}

// awaitOne waits until there may be something new of a disk that is to leave, again at the latest.
func awaitOne(ctx context.Context, other *disk, refused <-chan struct{}, again time.Duration, limit <-chan time.Time) error {
	timer := time.NewTimer(again)
	defer timer.Stop()
	select {
	case <-other.whenGone():
	case <-refused:
	case <-timer.C:
		select {
		case <-limit: // both at once
			return errTimeEnough
		default:
		}
	case <-limit:
		return errTimeEnough
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

var errTimeEnough = errors.New("it had time enough")

// other returns the disk that the guest was asked to let go of, and has neither let go of nor refused, unless it is d.
func (h *hotplug) other(d *disk) *disk {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving == nil || h.leaving == d || !h.leaving.leaving() {
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
	h.last = time.Now()
	if h.leaving != d || !d.leaving() {
		h.leaving, h.since = d, h.last
	}
}

// untilAgain is for how long the guest need not be asked again.
func (h *hotplug) untilAgain() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(0, time.Until(h.last.Add(askAgain)))
}

// left is for how long others still wait for a disk.
func (h *hotplug) left(d *disk) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving != d || !d.leaving() {
		return hotplugLimit
	}
	return max(0, time.Until(h.since.Add(hotplugLimit)))
}
