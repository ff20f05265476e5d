package qemu

import "time"

// requests records the requests to release a disk, to decide which request a refusal answers. The
// refusal (QMP's DEVICE_UNPLUG_GUEST_ERROR) does not say, and a caller that gave up leaves its
// request pending.
//
//   - A refusal certainly answers the last request if QEMU has accepted all requests and the guest
//     refused after that.
//   - A refusal from before the last request was sent answers an earlier request.
//   - Any other refusal is ambiguous, and the guest is asked again.
//
// The disk's mutex guards the fields.
type requests struct {
	open     int           // requests that QEMU has not yet answered
	lost     bool          // an answer was lost: QEMU may carry out that request later, but before any later request
	sent     time.Time     // time of the last request
	answered time.Time     // time of the last answer
	refused  chan struct{} // closed, and replaced, when the guest has certainly refused
}

// request records that a request is being sent, and reports whether the guest was asked before.
func (d *disk) request() (before bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before, d.asked = d.asked, true
	d.open++
	d.sent = time.Now()
	return before
}

// requestAgain records a repeated request and returns true. It returns false, and the request must
// not be sent, if the guest was not asked before, or has released or refused the disk since.
func (d *disk) requestAgain() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.asked || d.isOut {
		return false
	}
	d.open++
	d.sent = time.Now()
	return true
}

// answer records that QEMU has answered a request, or that the answer was lost.
func (d *disk) answer(came bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open--
	d.lost = !came
	d.answered = time.Now()
}

// refusal returns a channel that is closed at the guest's next certain refusal.
func (d *disk) refusal() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.refused
}

// refuses records a refusal by the guest.
func (d *disk) refuses(when time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case !d.asked || when.Before(d.sent):
	case d.open == 0 && !d.lost && when.After(d.answered):
		d.asked = false
		close(d.refused)
		d.refused = make(chan struct{})
	default:
		select {
		case d.doubt <- struct{}{}:
		default:
		}
	}
}

// stays records that QEMU rejected the request, so that the guest was not asked.
func (d *disk) stays() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = false
}

// leaving reports whether the guest was asked for the disk and has neither released nor refused it.
func (d *disk) leaving() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked && !d.isOut
}
