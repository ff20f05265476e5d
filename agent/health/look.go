package health

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/deadline"
)

// examination is an examination in progress.
type examination struct {
	late    context.Context // ends when it has taken slowLimit
	end     context.CancelFunc
	answer  chan finding
	isDoubt bool   // it only accesses the device
	writes  bool   // it writes, and so waits for its own writes and flushes
	before  counts // of the device, when it began
	last    counts // at the last beat
	still   int    // beats in a row that have ended nothing of its kind; it stays at stillBeats
}

// stillBeats is how many such beats show that requests do not end soon, however soon others do: as
// long as slowLimit.
const stillBeats = 5

func (w *Watch) newExamination(doubt bool) *examination {
	now := countsOf(w.activity.device)
	e := &examination{answer: make(chan finding, 1), isDoubt: doubt, writes: !doubt && w.mayWrite(), before: now, last: now}
	e.late, e.end = deadline.Awake(context.Background(), slowLimit)
	return e
}

// mayWrite reports whether an examination writes.
func (w *Watch) mayWrite() bool {
	return w.owned.Load() && (w.target.Frozen == nil || !w.target.Frozen())
}

// beat processes the device's counts, a beatInterval after the last ones.
func (e *examination) beat(now counts) {
	ended := counts.ended
	if e.writes {
		ended = counts.changes
	}
	if e.still < stillBeats {
		e.still++
		if ended(now) != ended(e.last) {
			e.still = 0
		}
	}
	e.last = now
}

// isSlow reports whether an examination has taken long because of its disk, which has counts now.
func (e *examination) isSlow(now counts) bool {
	return e.late.Err() != nil && (e.still >= stillBeats || !now.isQuick(e.before))
}

// run looks at once, except after a pause: then nothing has happened but the call that paused it.
func (w *Watch) run(ctx context.Context, done chan<- struct{}) {
	defer close(done)
	why := due
	if _, known := w.Latest(); known && w.inFlight == nil {
		why = w.pause(ctx)
	}
	for why != over {
		select {
		case <-w.urgent: // this look covers it
		default:
		}
		if lost := w.look(ctx, false); lost {
			w.lose()
			return
		}
		why = w.pause(ctx)
	}
}

// lose ends the watch of a target that is not mounted there any more.
func (w *Watch) lose() {
	w.monitor.remove(w)
	if w.target.Lost != nil {
		w.target.Lost()
	}
}

// reason is why a wait has ended.
type reason int

const (
	over reason = iota // the watch has ended
	due                // the interval has passed
	poked
	wanted // the device was written to, or somebody asks
)

// pause waits until it is time to look again: settleInterval at least, unless the volume was
// healthy and an event calls, and only twice in a row. The second look, showInterval later, is for
// a fault that shows a moment after its event. A faulty filesystem is not examined at each line of
// the kernel's log, because a failing probe is logged itself, and on ext4 counts as one more error.
func (w *Watch) pause(ctx context.Context) reason {
	interval, early := settleInterval, (<-chan struct{})(nil)
	if len(w.faults()) == 0 {
		switch w.hasty {
		case 0:
			early = w.urgent
		case 1:
			interval = showInterval
		}
	}
	switch why := w.wait(ctx, interval, early); {
	case why == over:
		return over
	case why == poked, interval == showInterval:
		w.hasty++
		return poked
	}
	w.hasty = 0
	now := w.faults()
	if len(now) == 0 {
		return w.pauseHealthy(ctx)
	}
	w.idle = idleInterval
	if slices.ContainsFunc(now, Condition.untilRemount) {
		return w.wait(ctx, idleInterval, w.moved)
	}
	return w.wait(ctx, sickInterval, w.poked)
}

// faults returns the current conditions that are not only about space.
func (w *Watch) faults() []Condition {
	now, _ := w.Latest()
	return slices.DeleteFunc(slices.Clone(now), Condition.isOfSpace)
}

// pauseHealthy returns early if the kernel's log names the device or if the device is written to.
// The second check is needed because the log is rate-limited: a burst of errors on another disk
// hides the first error of this one. After a line in the log it returns early once more, because
// ext4 writes its superblock after it has logged. Nothing can be lost on a volume that nobody
// writes to, and nobody waits for news of one that nobody asks about (Asked): the interval grows,
// unless the volume has little space.
func (w *Watch) pauseHealthy(ctx context.Context) reason {
	if w.named {
		w.named = false
		return due
	}
	if now, _ := w.Latest(); len(now) > 0 {
		w.idle = idleInterval
	}
	why := w.wait(ctx, w.idle, w.poked)
	w.named = why == poked
	if why == due {
		w.idle = min(idleFactor*w.idle, idleLongest)
	} else {
		w.idle = idleInterval
	}
	return why
}

// wait returns after an interval, or as soon as early delivers (nil never does). On a doubt about
// the device, wait checks the device and the interval goes on, because writing stops often.
func (w *Watch) wait(ctx context.Context, interval time.Duration, early <-chan struct{}) reason {
	end := time.NewTimer(interval)
	defer end.Stop()
	var doubts, written <-chan struct{}
	if early == w.poked {
		doubts, written = w.doubted, w.written
	}
	for {
		w.mu.Lock()
		w.waits = true
		w.mu.Unlock()
		why := due
		doubted := false
		select {
		case <-ctx.Done():
			why = over
		case <-early:
			why = poked
		case <-written:
			why = wanted
		case <-end.C:
		case <-doubts:
			doubted = true
		}
		if w.goOn(ctx); ctx.Err() != nil {
			w.giveBack(why, doubted)
			return over
		}
		if !doubted {
			return why
		}
		w.look(ctx, true)
	}
}

// giveBack delivers again what has ended a wait, when a call ends the goroutine at the same moment:
// the next one looks then.
func (w *Watch) giveBack(why reason, doubted bool) {
	switch why {
	case poked:
		w.poke()
		deliver(w.moved)
	case wanted:
		deliver(w.written)
	}
	if doubted {
		deliver(w.doubted)
	}
}

// goOn ends a wait. It returns when the goroutine is not held, or when ctx has ended.
func (w *Watch) goOn(ctx context.Context) {
	w.mu.Lock()
	w.waits = false
	held := w.held
	w.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-ctx.Done():
		}
	}
}

// look examines the target, or only checks the device if doubt is set, and waits for the answer.
// Only one examination is in progress at a time; it goes on if ctx ends. If the device hangs, look
// starts nothing: the watch is poked when the device stops hanging.
func (w *Watch) look(ctx context.Context, doubt bool) (lost bool) {
	for {
		if w.inFlight == nil {
			if w.Hangs() {
				return false
			}
			e := w.newExamination(doubt)
			w.inFlight = e
			go func() { e.answer <- w.examine(doubt) }()
		}
		examined := !w.inFlight.isDoubt
		if lost, answered := w.await(ctx); !answered || examined || doubt {
			return lost
		}
		// That examination only checked the device, before a pause that has ended meanwhile.
	}
}

// await waits for the examination in flight until ctx ends.
func (w *Watch) await(ctx context.Context) (lost, answered bool) {
	limit, again := w.inFlight.late.Done(), time.NewTicker(beatInterval)
	defer again.Stop()
	late := time.AfterFunc(beatInterval, w.monitor.pulse.stir) // the device may hang
	defer late.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, false
		case f := <-w.inFlight.answer:
			return w.took(f), true
		case <-limit:
			limit = nil
			w.noteSlow()
		case <-again.C:
			w.inFlight.beat(countsOf(w.activity.device))
			w.noteSlow()
		}
	}
}

// noteSlow notes that the disk is slow if the examination in flight shows that.
func (w *Watch) noteSlow() {
	w.mu.Lock()
	known := w.slow
	w.mu.Unlock()
	if !known && w.inFlight.isSlow(countsOf(w.activity.device)) {
		w.note(func() { w.slow = true })
	}
}

// examine runs examine(target), or only checks the device, and turns a panic into a failure.
func (w *Watch) examine(doubt bool) (f finding) {
	w.examining.Store(true)
	defer w.examining.Store(false)
	defer func() {
		if p := recover(); p != nil {
			f = finding{failure: fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
		}
	}()
	_ = blockdev.Ask(w.target.Device.Path) // errors are in the kernel's log
	if doubt {
		return finding{}
	}
	w.join() // before the examination, so that no error between the two is missed
	w.monitorXFS()
	w.mu.Lock()
	stopped := w.stopped
	w.mu.Unlock()
	f = examine(w.target, w.mayWrite(), stopped)
	readSpace(w.target, &f)
	return f
}

// took processes the result of an examination.
func (w *Watch) took(f finding) (lost bool) {
	e := w.inFlight
	w.inFlight = nil
	slow := e.isSlow(countsOf(w.activity.device))
	e.end()
	if e.isDoubt {
		w.note(func() { w.slow = w.slow || slow })
		return false
	}
	w.mu.Lock()
	w.activity.looked()
	w.mu.Unlock()
	var stay []Condition // nothing new is known about these
	w.mu.Lock()
	was := w.found
	w.mu.Unlock()
	switch {
	case f.failure != nil:
		w.monitor.log.WithField("mountpoint", w.target.Mountpoint).Warnf("health cannot be examined: %v", f.failure)
		f.conditions, stay = nil, was
	case f.refused:
		stay = probedOnly(was)
	}
	if f.again {
		w.poke()
	}
	w.ends(f.end)
	w.saw(f.conditions)
	f.conditions = append(f.conditions, w.low(f)...)
	found := w.remember(append(f.conditions, stay...))
	w.note(func() { w.found, w.details, w.slow = found, f.details, slow })
	w.answer()
	return errors.Is(f.failure, errUnmounted)
}

// probedOnly returns the conditions whose end only a probe can see.
func probedOnly(all []Condition) []Condition {
	return slices.DeleteFunc(slices.Clone(all), func(c Condition) bool { return c.Reason != ReasonIOError && c.Reason != ReasonOutOfSpace })
}

// remember adds faults that have passed and can no longer be seen. A write that failed with an I/O
// error was lost to any program that did not check fsync. A failed read shows only in the kernel's
// log. A disk that was smaller for a while may have come back without its earlier contents.
func (w *Watch) remember(found []Condition) []Condition {
	found = slices.DeleteFunc(slices.Clone(found), func(c Condition) bool {
		return c.Reason == ReasonPastIOError || c.Reason == ReasonReadError || c.Reason == ReasonPastDeviceTooSmall
	})
	if slices.ContainsFunc(found, isInaccessible) {
		return found
	}
	add := func(reason, text string) {
		found = append(found, w.target.condition(Degraded, reason, "%s", text))
	}
	past := w.Past()
	if !past.Failed.IsZero() {
		add(ReasonPastIOError, "writes have failed and succeed again: data written before then without fsync may be lost; unmount and mount it to clear this")
	}
	if !past.Smaller.IsZero() {
		add(ReasonPastDeviceTooSmall, "its disk was smaller than the filesystem and is large enough again: the data beyond the smaller size may be lost: unmount it and check the detached disk; mounting it again clears this")
	}
	if past.Unreadable > 0 {
		add(ReasonReadError, "reads have failed since it was mounted: part of the disk cannot be read: find the sectors in the guest's kernel log, and restore the data in that part")
	}
	return found
}

// saw notes when conditions were last seen that remember needs.
func (w *Watch) saw(found []Condition) {
	for _, c := range found {
		switch c.Reason {
		case ReasonIOError:
			w.seenNow(&w.past.Failed)
		case ReasonDeviceTooSmall:
			w.seenNow(&w.past.Smaller)
		}
	}
}

// seenNow sets a time of Past to now.
func (w *Watch) seenNow(when *time.Time) {
	w.mu.Lock()
	*when = time.Now()
	w.mu.Unlock()
	w.monitor.remembers()
}
