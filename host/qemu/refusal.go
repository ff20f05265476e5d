package qemu

import "time"

// requests are those to let go of a disk. A refusal (QMP's DEVICE_UNPLUG_GUEST_ERROR) does not say which request it answers, and a
// caller who has given up leaves his behind. A refusal is of the last request for sure where QEMU has said that it took all of
// them, and the guest refused after that. One that came before the last request was sent is of an earlier one. What lies between
// leaves it open, and the guest is asked again. The disk's mutex guards them.
type requests struct {
	open     int           // that QEMU has not answered
	lost     bool          // the answer to one did not come: it may be carried out later, but before what is sent after it
	sent     time.Time     // the last one
	answered time.Time     // the last one
	refused  chan struct{} // closed, and made anew, when the guest has refused for sure
}

// request notes that QEMU is sent a request, and reports whether the guest was asked before.
func (d *disk) request() (before bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	before, d.asked = d.asked, true
	d.open++
	d.sent = time.Now()
	return before
}

// requestAgain notes another request, where the guest was asked before and has neither let go nor refused since; else none may be made.
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

// answer notes that QEMU has answered a request, or that its answer does not come.
func (d *disk) answer(came bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open--
	d.lost = !came
	d.answered = time.Now()
}

// refusal returns a channel that is closed when the guest refuses next.
func (d *disk) refusal() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.refused
}

// refuses notes that the guest has refused.
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

// stays notes that the guest is not asked, as QEMU refused the request.
func (d *disk) stays() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = false
}

// leaving reports whether the guest was asked for the disk, and has neither let go of it nor refused.
func (d *disk) leaving() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked && !d.isOut
}
