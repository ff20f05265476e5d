package qemu

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/directvol/directvol/host/qmp"
)

// ErrHotplugHeld means that a disk cannot be attached or detached, because the guest has not yet
// released another one. The guest processes its ACPI hotplug events one by one: it would not see an
// added disk, and would keep a removed one.
var ErrHotplugHeld = errors.New("the guest does not release another disk, and until then no disk can be attached or detached")

// diskEvents are the QMP events about disks.
var diskEvents = []string{"DEVICE_DELETED", "DEVICE_UNPLUG_GUEST_ERROR"}

// hotplug serializes attaching and detaching, in the order of the callers. With 20 disks at a time,
// two concurrent removals, or an addition during a removal, made 1 of 18 mounts fail and removed
// disks that nobody had asked for.
type hotplug struct {
	turn chan struct{} // holds a token while a disk is added, or until a disk has left
	ask  asker

	mu      sync.Mutex
	leaving *disk     // the disk that the guest was last asked to release
	since   time.Time // time of the first request for leaving
	last    time.Time // time of the latest request
}

// asker asks the guest again to release a disk, if a repeated request is allowed, and records the
// request (hotplug.asks).
type asker func(ctx context.Context, d *disk) (gone bool, err error)

func newHotplug(ask asker) *hotplug { return &hotplug{turn: make(chan struct{}, 1), ask: ask} }

// take waits for the turn of disk d, and then, for up to hotplugLimit, until the guest has released
// the previous disk. done ends the turn and may be called twice.
func (h *hotplug) take(ctx context.Context, d *disk) (done func(), err error) {
	select {
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, h.held(d, fmt.Errorf("wait until other disks are attached or detached: %w", ctx.Err()))
	}
	done = sync.OnceFunc(func() { <-h.turn })
	if err := h.awaitOther(ctx, d); err != nil {
		done()
		return nil, h.held(d, err)
	}
	return done, nil
}

// awaitOther waits until the guest has released or refused the disk it was last asked for. If
// askAgain has passed without a request, awaitOther asks again: the previous caller may have given
// up, and a booting guest misses requests. After each request the guest has at least askAgain to
// obey, even if hotplugLimit is over.
func (h *hotplug) awaitOther(ctx context.Context, d *disk) error {
	var limit <-chan time.Time
	for {
		other := h.other(d)
		if other == nil {
			return nil
		}
		refused := other.refusal()
		if h.other(d) == nil { // the guest refused just now
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

// awaitOne waits until the other disk has left or was refused, or for the duration again.
func awaitOne(ctx context.Context, other *disk, refused <-chan struct{}, again time.Duration, limit <-chan time.Time) error {
	timer := time.NewTimer(again)
	defer timer.Stop()
	select {
	case <-other.whenGone():
	case <-refused:
	case <-timer.C:
		select {
		case <-limit: // again and limit may expire together
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

var errTimeEnough = errors.New("its time is over")

// other returns the disk that the guest was asked to release and has neither released nor refused;
// nil if there is none or it is d.
func (h *hotplug) other(d *disk) *disk {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving == nil || h.leaving == d || !h.leaving.leaving() {
		return nil
	}
	return h.leaving
}

// held adds to err which disk holds the others up, if one does.
func (h *hotplug) held(d *disk, err error) error {
	other := h.other(d)
	if other == nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return fmt.Errorf("%w: disk %s (%s), since %v: %w", ErrHotplugHeld, other.ID, other.Path, time.Since(h.since).Round(time.Second), err)
}

// asks records that the guest is being asked to release a disk.
func (h *hotplug) asks(d *disk) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = time.Now()
	if h.leaving != d || !d.leaving() {
		h.leaving, h.since = d, h.last
	}
}

// untilAgain returns how long to wait before the guest may be asked again.
func (h *hotplug) untilAgain() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return max(0, time.Until(h.last.Add(askAgain)))
}

// left returns how much longer other disks wait for disk d.
func (h *hotplug) left(d *disk) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leaving != d || !d.leaving() {
		return hotplugLimit
	}
	return max(0, time.Until(h.since.Add(hotplugLimit)))
}
