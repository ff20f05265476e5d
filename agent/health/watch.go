package health

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/fanotify"
	"github.com/directvol/directvol/agent/mount"
	"github.com/directvol/directvol/agent/xfsmonitor"
)

// Watch watches the health of one mounted filesystem.
type Watch struct {
	monitor *Monitor
	target  Target
	owned   atomic.Bool
	poked   chan struct{}
	moved   chan struct{} // the mount has changed
	urgent  chan struct{} // poked by an event that no examination of a healthy volume causes
	written chan struct{} // the device was written to, or somebody asks
	doubted chan struct{} // a doubt whether the device answers
	looked  chan struct{} // closed after the first look

	// Used by the goroutine that looks, and by Pause while that does not run:
	named    bool          // the last look was caused by the kernel's log
	hasty    int           // how many looks in a row came before settleInterval had passed
	idle     time.Duration // until the next look, if nothing happens
	inFlight *examination  // the examination that has not answered yet

	lowSpace, lowInodes bool // whether there is such a condition

	control sync.Mutex // guards starting and ending the goroutine
	cancel  context.CancelFunc
	done    chan struct{}

	paused    atomic.Bool // changed with control held
	examining atomic.Bool // an examination is in progress
	ended     atomic.Bool

	mu        sync.Mutex
	waits     bool                // the goroutine waits between two looks; nothing is in flight
	held      chan struct{}       // closed at the end of a pause that found the goroutine waiting; else nil
	found     []Condition         // by the last examination, and what is remembered
	details   []string            // of the last examination, for the log
	event     string              // the last error that the filesystem has reported, for the log; "" for none
	group     *fanotify.Group     // the one that the filesystem was added to; nil for none
	xfs       *xfsmonitor.Monitor // the health monitor; nil for none
	monitored bool                // a health monitor was opened, or the filesystem has none
	fsid      unix.Fsid           // by which group's events name the filesystem; zero if it reports none
	options   string              // of the mount, when it was last compared with mountinfo
	seen      *mount.Info         // the mount, when its options were last compared; nil before, and while it is not in sight
	slow      bool                // the last examination took long, or the one in progress does
	stall     stall               // of the device
	activity  activity            // of the device
	next      chan struct{}       // closed after the next look; nil if nobody waits for it
	asking    bool                // a read by ask has not ended
	there     bool                // the device existed at the last count
	now       []Condition         // all current conditions
	stopped   bool                // the log says that the filesystem has made itself read-only
	past      Past
	end       uint64 // the filesystem's end on its disk, in bytes, at the last examination; 0 before
	most      uint64 // the largest size, in sectors, from which the disk shrank before end was known
	least     uint64 // the smallest size to which it shrank; 0 for none
	bytes     uint64 // the device's size when it was last read; 0 if it was not known
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
	// one. Both are for the log.
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
	}
	conditions, known := w.Latest() // which counts even if ctx has ended, too
	if !known {
		return nil, fmt.Errorf("%s on %s has not been examined yet: %w", w.target.FSType, w.target.Device.Path, ctx.Err())
	}
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

// poke makes the watch look soon. It never blocks.
func (w *Watch) poke() { deliver(w.poked) }

// hurry is poke for an event that no examination of a healthy volume causes.
func (w *Watch) hurry() {
	w.poke()
	deliver(w.urgent)
}

func deliver(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// hear processes a line of the kernel's log that names the device. A healthy volume's examination
// causes lines, but none about a failed request or a filesystem that has stopped. The kernel logs
// only some of the failed requests of all disks, and a filesystem's or the page cache's line about
// one may be the only one. hear reports
// whether the line is to be remembered: Past has changed, or the disk has become smaller. A shrink
// that leaves room for the filesystem is remembered as read: the next agent would compare it with
// the end that the filesystem has by then.
func (w *Watch) hear(said line, message []byte) (remember bool) {
	w.mu.Lock()
	if said.read {
		w.past.Unreadable++
		w.past.LastRead = string(message)
	}
	if said.write {
		w.past.Failed = time.Now()
	}
	compared := said.shrunk && w.shrunk(said.before, said.sectors)
	w.stopped = (w.stopped || said.stopped) && !said.remounted
	w.mu.Unlock()
	if said.read || said.write || said.stopped || said.failed {
		w.hurry()
	} else {
		w.poke()
	}
	return said.read || said.write || compared
}

// sectorBytes is the kernel's unit of a disk's size, whatever the disk's own sector size is.
const sectorBytes = 512

// shrunk processes a decrease of the disk's size, and notes whether the disk ended before the
// filesystem does. It returns false if it must wait for the filesystem's end to compare them. The
// disk may have its earlier size again before the next examination. A line about a growth proves
// nothing: the filesystem may have grown again before the line is read. Neither does a line about a
// disk that the filesystem would not have fitted on: both have grown since. w.mu is held.
func (w *Watch) shrunk(before, sectors uint64) (compared bool) {
	if w.end == 0 {
		w.most, w.least = max(before, w.most), min(sectors, cmp.Or(w.least, sectors))
		return false
	}
	if end := w.end / sectorBytes; sectors < end && end <= before {
		w.past.Smaller = time.Now()
	}
	return true
}

// measure reads the disk's size and compares it with the filesystem's end; a size of 0 means that
// it is not known. The end is the one that was known before the size is read: disk and filesystem
// may grow, and an examination may find the new end, before the old size is compared.
func (w *Watch) measure(sectors func() uint64) {
	w.mu.Lock()
	end := w.end
	w.mu.Unlock()
	size := sectors()
	short := size != 0 && size < end/sectorBytes
	if short {
		w.mu.Lock()
		w.past.Smaller = time.Now()
		w.mu.Unlock()
	}
	if short {
		w.monitor.remembers()
		w.poke()
	}
}

// sized processes the device's size in bytes, as its own node has it.
func (w *Watch) sized(bytes uint64) {
	w.mu.Lock()
	changed := w.bytes != bytes
	w.bytes = bytes
	w.mu.Unlock()
	if changed {
		w.changed()
	}
}

// changed tells the target's owner that a size or a condition has changed. w.mu is not held.
func (w *Watch) changed() {
	if w.target.Changed != nil {
		w.target.Changed()
	}
}

// FilesystemEnd returns where the filesystem ended on its disk at the last examination, in bytes; 0
// before.
func (w *Watch) FilesystemEnd() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.end
}

// ends records the filesystem's end as found by an examination.
func (w *Watch) ends(end uint64) {
	if end == 0 { // not known
		return
	}
	w.mu.Lock()
	was := w.end
	w.end = end
	remember := was == 0 && w.least != 0 && w.shrunk(w.most, w.least)
	w.mu.Unlock()
	if remember {
		w.monitor.remembers()
	}
	if was != end {
		w.changed()
	}
}

// Asked makes the watch look soon if it has not for idleInterval, because somebody wants to know
// its conditions. The channel is closed after that look. It is nil if nobody should wait: the last
// look is newer, or the next one may take long, because a call has paused the watch or the device
// is known not to answer. Asked does not block.
func (w *Watch) Asked() (look <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.activity.isOlder(idleInterval) {
		return nil
	}
	deliver(w.written)
	if w.slow || w.stall.hangs() || w.paused.Load() || w.ended.Load() {
		return nil
	}
	if w.next == nil {
		w.next = make(chan struct{})
	}
	return w.next
}

// answer closes the channel that Asked has returned.
func (w *Watch) answer() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.next != nil {
		close(w.next)
		w.next = nil
	}
}

// beat processes the kernel's counts of the device's requests. there is false if the device is
// gone. It returns how many requests have ended since the last counts, and whether the device, or
// the agent with it, has something to do.
func (w *Watch) beat(now counts, there bool) (ended uint64, busy bool) {
	w.mu.Lock()
	ended = now.ended() - w.stall.last.ended()
	due := w.activity.isDue(now.writes) || w.slow && w.activity.isOlder(sickInterval)
	left := w.there && !there
	w.there = there
	was := w.stall.hangs()
	doubt := w.stall.beat(now)
	hangs := w.stall.hangs()
	busy = now.inFlight > 0 || due || w.examining.Load() || w.paused.Load()
	if there && w.stall.isUnknown() && !w.asking && (w.examining.Load() || w.paused.Load()) {
		w.ask()
	}
	w.mu.Unlock()
	if hangs != was {
		w.note(func() {})
	}
	if was && !hangs || left {
		w.hurry()
	}
	if doubt {
		deliver(w.doubted)
	}
	if due {
		deliver(w.written)
	}
	return ended, busy
}

// ask sends the device a read, for which no thread waits. It is for a thread of the agent's that
// may wait for a flush: an examination's, or that of the call which has paused the watch. The
// kernel does not count the flush in flight, but it counts the read. w.mu is held.
func (w *Watch) ask() {
	w.asking, w.stall.asked = true, true
	go func() {
		_ = blockdev.AskAside(w.target.Device.Path) // errors are in the kernel's log
		w.mu.Lock()
		defer w.mu.Unlock()
		w.asking = false
	}()
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

// all returns all current conditions. w.mu is held.
func (w *Watch) all() []Condition {
	one := func(status Status, reason, format string, args ...any) []Condition {
		return append([]Condition{w.target.condition(status, reason, format, args...)}, w.found...)
	}
	switch {
	case w.stall.hangs():
		return one(Inaccessible, ReasonIOHung, "its disk hangs: requests are in flight, and none has completed for %v or more: check the path to its storage; the volume recovers by itself when the storage answers",
			hungBeats*beatInterval)
	case w.slow:
		return one(Degraded, ReasonIOSlow, "some requests to its disk have taken %v or more: check the path to its storage", slowLimit)
	}
	return w.found
}

// note changes the state, and logs the conditions if they have changed.
func (w *Watch) note(change func()) {
	w.mu.Lock()
	before := w.now
	change()
	w.now = dated(w.all(), before, time.Now())
	now, details := w.now, w.detail()
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
	w.changed()
	entry := w.monitor.log.WithFields(logrus.Fields{"mountpoint": w.target.Mountpoint, "device": w.target.Device.Path})
	if details != "" {
		entry = entry.WithField("details", details)
	}
	if abnormal {
		entry.Warn("volume condition: " + is)
	} else {
		entry.Info("volume condition: " + is)
	}
}
