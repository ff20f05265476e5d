package health

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/blockdev"
)

// Watch watches the health of one mounted filesystem.
type Watch struct {
	monitor *Monitor
	target  Target
	owned   atomic.Bool
	poked   chan struct{}
	doubted chan struct{} // a doubt whether the device answers
	looked  chan struct{} // closed after the first look

	// Used by the goroutine that looks, and by Pause while that does not run:
	activity activity
	named    bool         // the last look was caused by the kernel's log
	inFlight *examination // the examination that has not answered yet

	control sync.Mutex // guards starting and ending the goroutine
	cancel  context.CancelFunc
	done    chan struct{}
	paused  bool

	ended atomic.Bool

	mu      sync.Mutex
	waits   bool          // the goroutine waits between two looks; nothing is in flight
	held    chan struct{} // closed at the end of a pause that found the goroutine waiting; else nil
	found   []Condition   // by the last examination, and what is remembered
	slow    bool          // the last examination took long, or the one in progress does
	stall   stall         // of the device
	there   bool          // the device existed at the last count
	now     []Condition   // all current conditions
	stopped bool          // the log says that the filesystem has made itself read-only
	past    Past
	end     uint64 // the filesystem's end on its disk, in bytes, at the last examination; 0 before
	least   uint64 // the smallest size, in sectors, that the disk had before end was known; 0 for none
}

// examination is an examination in progress.
type examination struct {
	began   time.Time
	answer  chan finding
	isDoubt bool // it only accesses the device
}

// Past is what a watch remembers of a mount and can no longer see. It is all that the next agent's
// watch needs to be told.
type Past struct {
	// Failed is when a probe last failed with an I/O error, or the kernel last logged a failed
	// write.
	Failed time.Time `json:"failed,omitzero"`
	// Smaller is when the disk was last found to end before the filesystem does.
	Smaller time.Time `json:"smaller,omitzero"`
	// Unreadable is how many reads have failed. LastRead is the kernel's message about the last
	// one.
	Unreadable int    `json:"unreadable,omitempty"`
	LastRead   string `json:"last_read,omitempty"`
}

// Past returns what the watch remembers.
func (w *Watch) Past() Past {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.past
}

// Remember adds the Past of an earlier watch of the same filesystem.
func (w *Watch) Remember(past Past) {
	w.mu.Lock()
	if past.Failed.After(w.past.Failed) {
		w.past.Failed = past.Failed
	}
	if past.Smaller.After(w.past.Smaller) {
		w.past.Smaller = past.Smaller
	}
	if w.past.Unreadable += past.Unreadable; w.past.LastRead == "" {
		w.past.LastRead = past.LastRead
	}
	w.mu.Unlock()
	w.monitor.remembers()
	w.poke()
}

// start starts the goroutine that looks. The caller holds control, or is the only one that knows
// the watch.
func (w *Watch) start() {
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel, w.done = cancel, make(chan struct{})
	go w.run(ctx, w.done)
}

// Own marks the mount as the agent's: a probe may write to it, because nobody else unmounts it.
func (w *Watch) Own() {
	if !w.owned.Swap(true) {
		w.poke()
	}
}

// Disown undoes Own: the mount is left to somebody else.
func (w *Watch) Disown() { w.owned.Store(false) }

// Owned reports whether the mount is the agent's.
func (w *Watch) Owned() bool { return w.owned.Load() }

// Conditions returns the current conditions; nil if there are none. Right after Watch it waits for
// the first look, and fails if ctx ends before that. The caller must not change the slice.
func (w *Watch) Conditions(ctx context.Context) ([]Condition, error) {
	select {
	case <-w.looked:
	case <-ctx.Done():
		return nil, fmt.Errorf("%s on %s has not been looked at yet: %w", w.target.FSType, w.target.Device.Path, ctx.Err())
	}
	conditions, _ := w.Latest()
	return conditions, nil
}

// Latest is Conditions without waiting. It returns false before the first look.
func (w *Watch) Latest() ([]Condition, bool) {
	select {
	case <-w.looked:
	default:
		return nil, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now, true
}

// Pause stops the watch from looking, so that the filesystem can be grown, frozen or unmounted. The
// checks that do not access the disk go on. Pause fails if a probe in flight does not return before
// ctx ends; then the watch goes on.
func (w *Watch) Pause(ctx context.Context) error {
	w.control.Lock()
	defer w.control.Unlock()
	if w.hold() {
		w.paused = true
		return nil
	}
	w.cancel()
	<-w.done
	w.paused = true
	if w.inFlight == nil {
		return nil
	}
	select {
	case f := <-w.inFlight.answer:
		w.took(f)
		return nil
	case <-ctx.Done():
		w.paused = false
		if !w.ended.Load() {
			w.start()
		}
		return ctx.Err()
	}
}

// PauseAtOnce is Pause for a watch that is only waiting for its next look. If there is anything to
// wait for, it does nothing and returns false.
func (w *Watch) PauseAtOnce() bool {
	if !w.control.TryLock() {
		return false
	}
	defer w.control.Unlock()
	w.paused = w.hold()
	return w.paused
}

// Resume makes a paused watch look again, with all that it knew, unless it was ended meanwhile.
func (w *Watch) Resume() {
	w.control.Lock()
	defer w.control.Unlock()
	w.paused = false
	if w.ended.Load() {
		return
	}
	if now, _ := w.Latest(); len(now) > 0 { // the call that has paused the watch may have cleared them
		w.poke()
	}
	if w.release() {
		return
	}
	<-w.done // End may have cancelled it since
	w.start()
}

// hold keeps a waiting goroutine from its next look until release, and reports whether it was
// waiting. Ending the goroutine and starting another one after a growth would take longer than all
// else that the agent does for the growth. control is held.
func (w *Watch) hold() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waits {
		w.held = make(chan struct{})
	}
	return w.waits
}

// release lets a held goroutine continue, and reports whether one was held. control is held.
func (w *Watch) release() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held == nil {
		return false
	}
	close(w.held)
	w.held = nil
	return true
}

// End ends the watch without blocking. A probe in flight goes on by itself.
func (w *Watch) End() {
	w.monitor.remove(w)
	w.ended.Store(true)
	go w.settle()
}

// Rest stops the watch from looking while its mount is out of sight, until End or Again. The watch
// still processes the kernel's log. Rest does not block.
func (w *Watch) Rest() {
	w.monitor.add(w) // lose may have removed it
	w.ended.Store(true)
	go w.settle()
}

// Again restarts a watch after Rest or End, with all that it knew, when its mount is in sight
// again. The watch waits for a probe that is still in flight. Again does not block.
func (w *Watch) Again() {
	w.ended.Store(false)
	w.monitor.add(w)
	w.poke()
	go w.settle()
}

// settle starts or stops the goroutine according to the last call of End, Rest or Again.
func (w *Watch) settle() {
	w.control.Lock()
	defer w.control.Unlock()
	w.cancel()
	w.release()
	if w.ended.Load() || w.paused {
		return
	}
	<-w.done
	w.start()
}

// poke makes the watch look soon. It never blocks.
func (w *Watch) poke() { deliver(w.poked) }

func deliver(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// hear processes a line of the kernel's log that names the device. It reports whether the line is to
// be remembered: Past has changed, or the disk has become smaller. A shrink that leaves room for the
// filesystem is remembered as read: the next agent would compare it with the end that the filesystem
// has by then.
func (w *Watch) hear(said line, message []byte) (remember bool) {
	w.mu.Lock()
	if said.read {
		w.past.Unreadable++
		w.past.LastRead = string(message)
	}
	if said.write {
		w.past.Failed = time.Now()
	}
	compared := said.shrunk && w.shrunk(said.sectors)
	w.stopped = (w.stopped || said.stopped) && !said.remounted
	w.mu.Unlock()
	w.poke()
	return said.read || said.write || compared
}

// sectorBytes is the kernel's unit of a disk's size, whatever the disk's own sector size is.
const sectorBytes = 512

// shrunk processes the disk's new, smaller size, and notes whether the disk ended before the
// filesystem does. It returns false if it must wait for the filesystem's end to compare them. The
// disk may have its earlier size again before the next examination. A line about a growth proves
// nothing: the filesystem may have grown again before the line is read. w.mu is held.
func (w *Watch) shrunk(sectors uint64) (compared bool) {
	if w.end == 0 {
		w.least = min(sectors, cmp.Or(w.least, sectors))
		return false
	}
	if sectors < w.end/sectorBytes {
		w.past.Smaller = time.Now()
	}
	return true
}

// ends records the filesystem's end as found by an examination.
func (w *Watch) ends(end uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if end == 0 { // not known
		return
	}
	first := w.end == 0
	w.end = end
	if first && w.least != 0 && w.shrunk(w.least) {
		w.monitor.remembers()
	}
}

// beat processes the kernel's counts of the device's requests. there is false if the device is
// gone.
func (w *Watch) beat(now counts, there bool) {
	w.mu.Lock()
	left := w.there && !there
	w.there = there
	was := w.stall.hangs()
	doubt := w.stall.beat(now)
	hangs := w.stall.hangs()
	w.mu.Unlock()
	if hangs != was {
		w.note(func() {})
	}
	if was && !hangs || left {
		w.poke()
	}
	if doubt {
		deliver(w.doubted)
	}
}

// run looks at once, except after a pause: then nothing has happened but the call that paused it.
func (w *Watch) run(ctx context.Context, done chan<- struct{}) {
	defer close(done)
	why := due
	if _, known := w.Latest(); known && w.inFlight == nil {
		why = w.pause(ctx)
	}
	for why != over {
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
)

// pause waits until it is time to look again. A faulty filesystem is not examined at each line of
// the kernel's log, because a failing probe is logged itself, and on ext4 counts as one more error.
func (w *Watch) pause(ctx context.Context) reason {
	now, _ := w.Latest()
	if slices.ContainsFunc(now, Condition.untilRemount) {
		return w.wait(ctx, idleInterval, nil)
	}
	if w.wait(ctx, settleInterval, nil) == over {
		return over
	}
	if len(now) == 0 {
		return w.pauseHealthy(ctx)
	}
	return w.wait(ctx, sickInterval, w.poked)
}

// pauseHealthy returns early if the kernel's log names the device or if the device is written to.
// The second check is needed because the log is rate-limited: a burst of errors on another disk
// hides the first error of this one. After a line in the log it returns early once more, because
// ext4 writes its superblock after it has logged.
func (w *Watch) pauseHealthy(ctx context.Context) reason {
	if w.named {
		w.named = false
		return due
	}
	for range idleInterval / activityInterval {
		why := w.wait(ctx, activityInterval, w.poked)
		w.named = why == poked
		if why != due || w.activity.seen() {
			return why
		}
	}
	return due
}

// wait returns after an interval, or as soon as early delivers (nil never does). On a doubt about
// the device, wait checks the device and the interval goes on, because writing stops often.
func (w *Watch) wait(ctx context.Context, interval time.Duration, early <-chan struct{}) reason {
	end := time.NewTimer(interval)
	defer end.Stop()
	doubts := w.doubted
	if early == nil {
		doubts = nil
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
		case <-end.C:
		case <-doubts:
			doubted = true
		}
		if w.goOn(ctx); ctx.Err() != nil {
			return over
		}
		if !doubted {
			return why
		}
		w.look(ctx, true)
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
			e := &examination{began: time.Now(), answer: make(chan finding, 1), isDoubt: doubt}
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
	limit := time.NewTimer(time.Until(w.inFlight.began.Add(slowLimit)))
	defer limit.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, false
		case f := <-w.inFlight.answer:
			return w.took(f), true
		case <-limit.C:
			w.note(func() { w.slow = true })
		}
	}
}

// Hangs reports whether requests of the device are in flight and none has ended for a while.
func (w *Watch) Hangs() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stall.hangs()
}

// Silent returns for how long no request of the device has ended, by the counts that Beat reads; 0
// if Beat does not run.
func (w *Watch) Silent() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Duration(w.stall.silent) * beatInterval
}

// examine runs examine(target), or only checks the device, and turns a panic into a failure.
func (w *Watch) examine(doubt bool) (f finding) {
	defer func() {
		if p := recover(); p != nil {
			f = finding{failure: fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
		}
	}()
	_ = blockdev.Ask(w.target.Device.Path) // errors are in the kernel's log
	if doubt {
		return finding{}
	}
	w.mu.Lock()
	stopped := w.stopped
	w.mu.Unlock()
	return examine(w.target, w.owned.Load(), stopped)
}

// took processes the result of an examination.
func (w *Watch) took(f finding) (lost bool) {
	e := w.inFlight
	w.inFlight = nil
	slow := time.Since(e.began) >= slowLimit
	if e.isDoubt {
		w.note(func() { w.slow = w.slow || slow })
		return false
	}
	w.activity.looked()
	if f.failure != nil {
		w.monitor.log.WithField("mountpoint", w.target.Mountpoint).Warnf("health cannot be examined: %v", f.failure)
		w.mu.Lock()
		f.conditions = w.found // nothing new is known
		w.mu.Unlock()
	}
	if f.refused {
		w.mu.Lock()
		f.conditions = append(f.conditions, probedOnly(w.found)...)
		w.mu.Unlock()
	}
	w.ends(f.end)
	found := w.remember(f.conditions)
	w.note(func() { w.found, w.slow = found, slow })
	return errors.Is(f.failure, errUnmounted)
}

// probedOnly returns the conditions whose end only a probe can see.
func probedOnly(all []Condition) []Condition {
	return slices.DeleteFunc(slices.Clone(all), func(c Condition) bool { return c.Reason != ReasonIOError && c.Reason != ReasonOutOfSpace })
}

// all returns all current conditions. w.mu is held.
func (w *Watch) all() []Condition {
	one := func(status Status, reason, format string, args ...any) []Condition {
		return append([]Condition{{status, reason, fmt.Sprintf("%s on %s: ", w.target.FSType, w.target.Device.Path) + fmt.Sprintf(format, args...)}}, w.found...)
	}
	switch {
	case w.stall.hangs():
		return one(Inaccessible, ReasonIOHung, "its disk hangs: requests are in flight (%d), and none has ended for %v or more: look at the path to its storage; it goes on by itself when that answers",
			w.stall.last.inFlight, hungBeats*beatInterval)
	case w.slow:
		return one(Degraded, ReasonIOSlow, "a few requests of its disk have taken %v or more: look at the path to its storage", slowLimit)
	}
	return w.found
}

// remember adds faults that have passed and can no longer be seen. A write that failed with an I/O
// error was lost to any program that did not check fsync. A failed read shows only in the kernel's
// log. A disk that was smaller for a while may have come back without its earlier contents.
func (w *Watch) remember(found []Condition) []Condition {
	found = slices.DeleteFunc(slices.Clone(found), func(c Condition) bool {
		return c.Reason == ReasonPastIOError || c.Reason == ReasonReadError || c.Reason == ReasonPastDeviceTooSmall
	})
	for _, c := range found {
		switch c.Reason {
		case ReasonIOError:
			w.seenNow(&w.past.Failed)
		case ReasonDeviceTooSmall:
			w.seenNow(&w.past.Smaller)
		}
		if isInaccessible(c) {
			return found
		}
	}
	add := func(reason, format string, args ...any) {
		found = append(found, Condition{Degraded, reason, fmt.Sprintf("%s on %s: ", w.target.FSType, w.target.Device.Path) + fmt.Sprintf(format, args...)})
	}
	past := w.Past()
	if !past.Failed.IsZero() {
		add(ReasonPastIOError, "writes failed until %s and work again: what was written then and not fsynced may be lost; unmount and mount it to clear this", past.Failed.UTC().Format(time.RFC3339))
	}
	if !past.Smaller.IsZero() {
		add(ReasonPastDeviceTooSmall, "its disk ended before it until %s, and is large enough again: what lay beyond may be lost: unmount it and check the detached disk; mounting it again clears this", past.Smaller.UTC().Format(time.RFC3339))
	}
	if past.Unreadable > 0 {
		add(ReasonReadError, "%d reads have failed since it was mounted, the last with %q: part of the disk cannot be read; restore what lies there", past.Unreadable, past.LastRead)
	}
	return found
}

// seenNow sets a time of Past to now.
func (w *Watch) seenNow(when *time.Time) {
	w.mu.Lock()
	*when = time.Now()
	w.mu.Unlock()
	w.monitor.remembers()
}

// note changes the state, and logs the conditions if they have changed.
func (w *Watch) note(change func()) {
	w.mu.Lock()
	before := w.now
	change()
	w.now = w.all()
	now := w.now
	select {
	case <-w.looked:
	default:
		close(w.looked)
	}
	w.mu.Unlock()
	_, was := Summary(before)
	abnormal, is := Summary(now)
	if was == is {
		return
	}
	entry := w.monitor.log.WithFields(logrus.Fields{"mountpoint": w.target.Mountpoint, "device": w.target.Device.Path})
	if abnormal {
		entry.Warn("volume condition: " + is)
	} else {
		entry.Info("volume condition: " + is)
	}
}
