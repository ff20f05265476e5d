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

// Watch is the health of one mounted filesystem.
type Watch struct {
	monitor *Monitor
	target  Target
	owned   atomic.Bool
	poked   chan struct{}
	doubted chan struct{} // whether the device answers
	looked  chan struct{} // closed after the first look

	// Of the goroutine that looks, and of Pause while there is none:
	activity activity
	named    bool         // the kernel's log is why it looked last
	inFlight *examination // that has not answered yet

	control sync.Mutex // of starting and ending the goroutine
	cancel  context.CancelFunc
	done    chan struct{}
	paused  bool

	ended atomic.Bool

	mu      sync.Mutex
	waits   bool          // the goroutine waits between two looks: nothing is in flight
	held    chan struct{} // closed when a pause ends that has found it so, nil where there is none
	found   []Condition   // by the last examination, and what is remembered
	slow    bool          // the last examination took long, or the one that is under way does
	stall   stall         // of the device
	there   bool          // the device was, when it was last counted
	now     []Condition   // all of that
	stopped bool          // the log says that the filesystem has made itself read-only
	past    Past
	end     uint64 // of the filesystem on its disk, in bytes, at the last examination; 0 before
	least   uint64 // sectors that the disk has had before end was known; 0 for none
}

// examination is one under way.
type examination struct {
	began   time.Time
	answer  chan finding
	isDoubt bool // it only asks the device
}

// Past is what a watch remembers of a mount and cannot see any more. It is all
// that a watch after the agent's restart has to be told.
type Past struct {
	// Failed is when a probe last failed with an I/O error, or the kernel's log
	// had a write that failed.
	Failed time.Time `json:"failed,omitzero"`
	// Smaller is when its disk was last found to end before it does.
	Smaller time.Time `json:"smaller,omitzero"`
	// Unreadable is how many reads have failed, and LastRead what the kernel's
	// log said of the last one.
	Unreadable int    `json:"unreadable,omitempty"`
	LastRead   string `json:"last_read,omitempty"`
}

// Past returns what the watch remembers.
func (w *Watch) Past() Past {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.past
}

// Remember adds what a watch before this one remembered, of the same filesystem.
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

// start has a goroutine look. control is held, or nobody knows the watch yet.
func (w *Watch) start() {
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel, w.done = cancel, make(chan struct{})
	go w.run(ctx, w.done)
}

// Own says that the mount is ours, and that a probe may write to it: nobody else unmounts
// it.
func (w *Watch) Own() {
	if !w.owned.Swap(true) {
		w.poke()
	}
}

// Disown ends Own: the mount is left to somebody else.
func (w *Watch) Disown() { w.owned.Store(false) }

// Owned reports whether Own was called.
func (w *Watch) Owned() bool { return w.owned.Load() }

// Conditions returns what is wrong; nil where nothing is. Right after Watch it
// waits for the first look, and fails where ctx ends before: nothing is known then. The
// slice is the caller's to read, not to change.
func (w *Watch) Conditions(ctx context.Context) ([]Condition, error) {
	select {
	case <-w.looked:
	case <-ctx.Done():
		return nil, fmt.Errorf("%s on %s has not been looked at yet: %w", w.target.FSType, w.target.Device.Path, ctx.Err())
	}
	conditions, _ := w.Latest()
	return conditions, nil
}

// Latest is Conditions without waiting: false before the first look.
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

// Pause has the watch look no more, so that the filesystem can be grown, frozen or
// unmounted; what costs the disk nothing goes on. It fails where a probe in flight does
// not come back before ctx ends; then the watch goes on.
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

// PauseAtOnce is Pause of a watch that only waits for its next look, and does nothing and
// returns false where there is anything to wait for.
func (w *Watch) PauseAtOnce() bool {
	if !w.control.TryLock() {
		return false
	}
	defer w.control.Unlock()
	w.paused = w.hold()
	return w.paused
}

// Resume has a paused watch look again, from what it knew; not one that was ended
// meanwhile.
func (w *Watch) Resume() {
	w.control.Lock()
	defer w.control.Unlock()
	w.paused = false
	if w.ended.Load() {
		return
	}
	if now, _ := w.Latest(); len(now) > 0 { // which may be over by what has paused it
		w.poke()
	}
	if w.release() {
		return
	}
	<-w.done // End may have ended it since
	w.start()
}

// hold keeps a goroutine that waits from its next look, until release, and reports whether
// it waits: to end one, and begin another one behind a growth, takes a growth's caller longer
// than all else that the agent does for it. control is held.
func (w *Watch) hold() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waits {
		w.held = make(chan struct{})
	}
	return w.waits
}

// release lets a goroutine go on that is held, and reports whether one was. control is held.
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

// End ends the watch, and waits for nobody. A probe in flight goes on alone.
func (w *Watch) End() {
	w.monitor.remove(w)
	w.ended.Store(true)
	go w.settle()
}

// Rest has the watch look no more, but hear the kernel's log, until End or Again: its mount
// is out of sight. It waits for nobody.
func (w *Watch) Rest() {
	w.monitor.add(w) // it may have lost its mount
	w.ended.Store(true)
	go w.settle()
}

// Again has a watch that rests or has ended go on, from what it knew: its mount was out of sight,
// and is there again. A probe that is in flight still is waited for. It waits for nobody.
func (w *Watch) Again() {
	w.ended.Store(false)
	w.monitor.add(w)
	w.poke()
	go w.settle()
}

// settle has the goroutine look, or not, by what End and Again have said last.
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

// poke has the watch look soon. It never blocks.
func (w *Watch) poke() { deliver(w.poked) }

func deliver(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// hear takes a line of the kernel's log that names the device, and tells whether
// it is one to remember.
func (w *Watch) hear(said line, message []byte) (remember bool) {
	w.mu.Lock()
	if said.read {
		w.past.Unreadable++
		w.past.LastRead = string(message)
	}
	if said.write {
		w.past.Failed = time.Now()
	}
	short := said.shrunk && w.shrunk(said.sectors)
	w.stopped = (w.stopped || said.stopped) && !said.remounted
	w.mu.Unlock()
	w.poke()
	return said.read || said.write || short
}

// sectorBytes is the kernel's unit of a disk's size, whatever its own sectors are.
const sectorBytes = 512

// shrunk takes the smaller size that the disk has got, and reports whether the disk ends before
// the filesystem does: the disk may have its size again before the next examination. A line
// about a growth proves nothing: the line may be read after the filesystem has grown once more.
// w.mu is held.
func (w *Watch) shrunk(sectors uint64) (short bool) {
	if w.end == 0 {
		w.least = min(sectors, cmp.Or(w.least, sectors))
		return false
	}
	if short = sectors < w.end/sectorBytes; short {
		w.past.Smaller = time.Now()
	}
	return short
}

// ends takes where the filesystem ends, by an examination.
func (w *Watch) ends(end uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if end == 0 { // it is not known
		return
	}
	first := w.end == 0
	w.end = end
	if first && w.least != 0 {
		w.shrunk(w.least)
	}
}

// beat takes what the kernel counts of the device's requests, where it is there.
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

// run looks at once, but not after a pause: nothing has happened since but what paused it.
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

// lose ends the watch of what is not mounted there any more.
func (w *Watch) lose() {
	w.monitor.remove(w)
	if w.target.Lost != nil {
		w.target.Lost()
	}
}

// reason is why a wait has ended.
type reason int

const (
	over reason = iota // the watch's time is
	due                // the interval is
	poked
)

// pause waits until it is time to look again. A sick filesystem is not looked at whenever
// the kernel's log says so: a probe that fails is itself in the log, and counts as one more
// error on ext4.
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

// pauseHealthy ends early where the kernel's log names the device, or where it
// is written to: the log is rate-limited, and a storm of errors on another disk
// hides the first of this one. What the log names may be seen a little later than
// the log, as ext4 writes its superblock after it: so it looks once more.
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

// wait returns after an interval, or as soon as early delivers, where it is not nil. Who
// doubts the device then has it asked, and the interval goes on: writing stops again and
// again.
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

// goOn ends a wait, and returns when nobody holds the goroutine, or ctx has ended.
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

// look examines the target, or where the device is in doubt only asks that, and waits for
// the answer. It is the only one under way, and goes on where ctx ends. Of a device that
// hangs it asks nothing more: the end of that pokes the watch.
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
		// The device was only asked, before a pause that has ended meanwhile.
	}
}

// await waits for what is in flight until ctx ends.
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

// Hangs reports whether the device's requests are in flight, and none has ended for a while.
func (w *Watch) Hangs() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stall.hangs()
}

// Silent returns how long no request of the device has ended, by the kernel's counts as Beat
// looks at them; 0 where it does not.
func (w *Watch) Silent() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Duration(w.stall.silent) * beatInterval
}

// examine runs examine(target), or asks the device alone, and turns a panic into a failure.
func (w *Watch) examine(doubt bool) (f finding) {
	defer func() {
		if p := recover(); p != nil {
			f = finding{failure: fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
		}
	}()
	_ = blockdev.Ask(w.target.Device.Path) // what fails is in the kernel's log
	if doubt {
		return finding{}
	}
	w.mu.Lock()
	stopped := w.stopped
	w.mu.Unlock()
	return examine(w.target, w.owned.Load(), stopped)
}

// took takes in what an examination has found.
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
		f.conditions = w.found // nothing was learnt
		w.mu.Unlock()
	}
	w.ends(f.end)
	found := w.remember(f.conditions)
	w.note(func() { w.found, w.slow = found, slow })
	return errors.Is(f.failure, errUnmounted)
}

// all is what is wrong with the volume. w.mu is held.
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

// remember adds what has passed and cannot be seen any more: a write that
// failed with an I/O error was lost to whoever did not look at fsync's answer,
// a read that failed shows in the kernel's log alone, and a disk that was smaller for a
// while may have come back without what it had.
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

// seenNow notes when something of the past was last seen.
func (w *Watch) seenNow(when *time.Time) {
	w.mu.Lock()
	*when = time.Now()
	w.mu.Unlock()
	w.monitor.remembers()
}

// note changes what is known, and logs the conditions where they have changed.
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
