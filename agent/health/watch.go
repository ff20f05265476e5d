package health

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
)

// Watch is the health of one mounted filesystem.
type Watch struct {
	monitor *Monitor
	target  Target
	poked   chan struct{}
	looked  chan struct{} // closed after the first look

	// Of the goroutine that looks, and of Pause while there is none:
	activity activity
	named    bool         // the kernel's log is why it looked last
	inFlight chan finding // an examination that has not answered yet

	control sync.Mutex // of starting and ending the goroutine
	cancel  context.CancelFunc
	done    chan struct{}
	ended   bool

	mu         sync.Mutex
	conditions []Condition
	past       Past
}

// Past is what a watch remembers of a mount and cannot see any more. It is all
// that a watch after the agent's restart has to be told.
type Past struct {
	// Failed is when a probe last failed with an I/O error.
	Failed time.Time `json:"failed,omitzero"`
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

// start has a goroutine look. control is held, or nobody knows the watch yet.
func (w *Watch) start() {
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel, w.done = cancel, make(chan struct{})
	go w.run(ctx, w.done)
}

// Conditions returns what is wrong; nil where nothing is. Right after Watch it
// waits for the first look, until ctx ends. The slice is the caller's to read,
// not to change.
func (w *Watch) Conditions(ctx context.Context) []Condition {
	select {
	case <-w.looked:
	case <-ctx.Done():
		return []Condition{w.hung()}
	}
	conditions, _ := w.Latest()
	return conditions
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
	return w.conditions, true
}

// Pause has the watch look no more, so that the filesystem can be unmounted. It
// fails where a probe in flight does not come back before ctx ends; then the
// watch goes on.
func (w *Watch) Pause(ctx context.Context) error {
	w.control.Lock()
	defer w.control.Unlock()
	w.cancel()
	<-w.done
	if w.inFlight == nil {
		return nil
	}
	select {
	case f := <-w.inFlight:
		w.took(f)
		return nil
	case <-ctx.Done():
		w.start()
		return ctx.Err()
	}
}

// Resume has a paused watch look again, from what it knew; not one that was ended
// meanwhile.
func (w *Watch) Resume() {
	w.control.Lock()
	defer w.control.Unlock()
	if !w.ended {
		w.start()
	}
}

// End ends the watch, without waiting for a probe in flight.
func (w *Watch) End() {
	w.monitor.remove(w)
	w.control.Lock()
	defer w.control.Unlock()
	w.ended = true
	w.cancel()
}

// poke has the watch look soon. It never blocks.
func (w *Watch) poke() {
	select {
	case w.poked <- struct{}{}:
	default:
	}
}

// hear takes a line of the kernel's log that names the device, and tells whether
// it is one to remember.
func (w *Watch) hear(message []byte) (remember bool) {
	if remember = isReadError(message); remember {
		w.mu.Lock()
		w.past.Unreadable++
		w.past.LastRead = string(message)
		w.mu.Unlock()
	}
	w.poke()
	return remember
}

func (w *Watch) run(ctx context.Context, done chan<- struct{}) {
	defer close(done)
	for {
		if unmounted := w.look(ctx); unmounted {
			w.monitor.remove(w)
			return
		}
		if !w.pause(ctx) {
			return
		}
	}
}

// pause waits until it is time to look again; false means that the watch ends.
// A sick filesystem is not looked at whenever the kernel's log says so: a probe
// that fails is itself in the log, and counts as one more error on ext4.
func (w *Watch) pause(ctx context.Context) bool {
	conditions, _ := w.Latest()
	if slices.ContainsFunc(conditions, Condition.untilRemount) {
		_, ok := wait(ctx, idleInterval, nil)
		return ok
	}
	if _, ok := wait(ctx, settleInterval, nil); !ok {
		return false
	}
	if len(conditions) == 0 {
		return w.pauseHealthy(ctx)
	}
	_, ok := wait(ctx, sickInterval, w.poked)
	return ok
}

// pauseHealthy ends early where the kernel's log names the device, or where it
// is written to: the log is rate-limited, and a storm of errors on another disk
// hides the first of this one. What the log names may be seen a little later than
// the log, as ext4 writes its superblock after it: so it looks once more.
func (w *Watch) pauseHealthy(ctx context.Context) bool {
	if w.named {
		w.named = false
		return true
	}
	for range idleInterval / activityInterval {
		poked, ok := wait(ctx, activityInterval, w.poked)
		w.named = poked
		if !ok || poked || w.activity.seen() {
			return ok
		}
	}
	return true
}

// wait returns after an interval, or as soon as early delivers; ok is false when
// ctx ends.
func wait(ctx context.Context, interval time.Duration, early <-chan struct{}) (delivered, ok bool) {
	due := time.NewTimer(interval)
	defer due.Stop()
	select {
	case <-ctx.Done():
		return false, false
	case <-early:
		return true, true
	case <-due.C:
		return false, true
	}
}

// look examines the target, for hungLimit at most: an examination that takes
// longer goes on alone, is the only one, and is the sign of a device that hangs.
func (w *Watch) look(ctx context.Context) (unmounted bool) {
	if w.inFlight == nil {
		answer := make(chan finding, 1)
		w.inFlight = answer
		go func() { answer <- w.examine() }()
	}
	limit := time.NewTimer(hungLimit)
	defer limit.Stop()
	select {
	case <-ctx.Done():
	case f := <-w.inFlight:
		return w.took(f)
	case <-limit.C:
		w.note([]Condition{w.hung()})
	}
	return false
}

// examine is examine of the target, which no bug in it ends the agent by.
func (w *Watch) examine() (f finding) {
	defer func() {
		if p := recover(); p != nil {
			f = finding{failure: fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
		}
	}()
	return examine(w.target)
}

// took takes in what an examination has found.
func (w *Watch) took(f finding) (unmounted bool) {
	w.inFlight = nil
	w.activity.looked()
	if f.failure != nil {
		w.monitor.log.WithField("mountpoint", w.target.Mountpoint).Warnf("health cannot be examined: %v", f.failure)
		f.conditions, _ = w.Latest() // nothing was learnt
	}
	w.note(w.remember(f.conditions))
	return errors.Is(f.failure, errUnmounted)
}

func (w *Watch) hung() Condition {
	return Condition{Inaccessible, ReasonIOHung, fmt.Sprintf(
		"%s on %s: it has not answered for %v: look at the disk's path to its storage; it goes on by itself when that answers", w.target.FSType, w.target.Device.Path, hungLimit)}
}

// remember adds what has passed and cannot be seen any more: a write that
// failed with an I/O error was lost to whoever did not look at fsync's answer,
// and a read that failed shows in the kernel's log alone.
func (w *Watch) remember(found []Condition) []Condition {
	found = slices.DeleteFunc(slices.Clone(found), func(c Condition) bool {
		return c.Reason == ReasonPastIOError || c.Reason == ReasonReadError
	})
	for _, c := range found {
		if c.Reason == ReasonIOError {
			w.failedNow()
		}
		if c.Status == Inaccessible {
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
	if past.Unreadable > 0 {
		add(ReasonReadError, "%d reads have failed since it was mounted, the last with %q: part of the disk cannot be read; restore what lies there", past.Unreadable, past.LastRead)
	}
	return found
}

func (w *Watch) failedNow() {
	w.mu.Lock()
	w.past.Failed = time.Now()
	w.mu.Unlock()
	w.monitor.remembers()
}

// note stores the conditions, and logs them where they have changed.
func (w *Watch) note(now []Condition) {
	w.mu.Lock()
	before := w.conditions
	w.conditions = now
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
