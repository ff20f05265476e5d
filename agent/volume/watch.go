package volume

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/directvol/directvol/agent/errkind"
	"github.com/directvol/directvol/agent/mount"
)

// EventType is what has happened to a volume.
type EventType int

// The types of events.
const (
	Added    EventType = iota + 1
	Changed            // a field of the report has changed
	Removed            // the report has the path alone
	Resync             // events were lost; an Added event of each volume follows
	Resynced           // an Added event of each volume was sent
)

// Event is a change of a volume. Resync and Resynced have no report.
type Event struct {
	Type   EventType
	Report Report
}

// relistAgain is how often a Watch compares its list with mountinfo without an event: a volume that
// could not be looked up has none of its own.
const relistAgain = 10 * time.Second

// maxEvents is how many events wait for a watcher. If there are more, all are dropped, and the
// watcher gets a Resync.
const maxEvents = 256

// watcher is one call of Watch. Its fields are guarded by watchers.mu.
type watcher struct {
	path   string // the only volume that it watches, or "" for all
	events []Event
	lost   bool          // more than maxEvents have happened
	ready  chan struct{} // has a value if there is an event
}

// watchers are those who want to know of the changes. It also numbers the reports, so that an event
// that was made before a list was is not taken for news.
//
// A condition, a step of a growth and a mount make an event at once, and each is put into the queue
// of each watcher: a condition that comes and goes is seen by all. Two mounts at one path between
// two looks at mountinfo are seen as one.
type watchers struct {
	mu     sync.Mutex
	all    []*watcher
	number uint64
	listed map[string]*Volume // the volumes in sight at the last look, by mount point
}

// reported returns v's report, with the next number. w.mu is held.
func (w *watchers) reported(v *Volume) Report {
	r := v.Report()
	r.number = w.next()
	return r
}

// changed tells the watchers of a change of v. Those of all volumes learn nothing of a volume that
// another one covers: its report would be taken for that one's. It does not block.
func (w *watchers) changed(v *Volume) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.all) > 0 {
		w.tell(Event{Changed, w.reported(v)}, v)
	}
}

// tell puts an event of a volume into the queues. w.mu is held.
func (w *watchers) tell(e Event, of *Volume) {
	listed := w.listed[e.Report.Path]
	covered := e.Type == Changed && listed != nil && listed != of
	for _, one := range w.all {
		if one.path == "" && covered || one.path != "" && one.path != e.Report.Path {
			continue
		}
		if one.lost || len(one.events) == maxEvents {
			one.events, one.lost = nil, true
		} else {
			one.events = append(one.events, e)
		}
		select {
		case one.ready <- struct{}{}:
		default:
		}
	}
}

// join makes a watcher of one volume, or of all if path is empty. The caller ends it by leave.
func (w *watchers) join(path string) (one *watcher, leave func()) {
	one = &watcher{path: path, ready: make(chan struct{}, 1)}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, one)
	return one, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.all = slices.DeleteFunc(w.all, func(other *watcher) bool { return other == one })
	}
}

// take empties a watcher's queue.
func (w *watchers) take(one *watcher) (events []Event, lost bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	events, lost = one.events, one.lost
	one.events, one.lost = nil, false
	return events, lost
}

// List returns the reports of the volumes in sight, sorted by path: every mount of a block device,
// whoever has made it. Those that were not known are watched from then on.
func (t *Table) List(ctx context.Context) ([]Report, error) {
	if err := t.relist(ctx); err != nil {
		return nil, err
	}
	t.watchers.mu.Lock()
	defer t.watchers.mu.Unlock()
	reports := make([]Report, 0, len(t.watchers.listed))
	for _, path := range slices.Sorted(maps.Keys(t.watchers.listed)) {
		reports = append(reports, t.watchers.reported(t.watchers.listed[path]))
	}
	return reports, nil
}

// relist compares the volumes in sight with those of the last time, and tells the watchers of the
// differences. A volume whose path leads through a server that does not answer is left out.
func (t *Table) relist(ctx context.Context) error { return t.relistAnyway(ctx, false) }

// relistAnyway is relist. anyway is set if it must look even though no mount has changed.
func (t *Table) relistAnyway(ctx context.Context, anyway bool) error {
	select {
	case t.listing <- struct{}{}:
		defer func() { <-t.listing }()
	case <-ctx.Done():
		return errkind.New(errkind.DeadlineExceeded, "the volumes cannot be listed: another list has not ended: %w", ctx.Err())
	}
	mounts, err := mount.Now()
	if err != nil || mounts == t.relisted && !anyway {
		return err
	}
	t.relisted = mounts
	if anyway {
		if mounts, err = mount.Reread(); err != nil {
			return err
		}
	}
	now := map[string]*Volume{}
	for _, m := range mounts.InSight() {
		if !isVolume(m) {
			continue
		}
		v, err := t.listedAt(mounts, m.Mountpoint)
		if err != nil {
			t.relisted = nil // it may answer the next time
			continue
		}
		if anyway && v.watch != nil {
			v.watch.Asked() // by the caller of Watch
		}
		now[m.Mountpoint] = v
		v.seenAs(m)
	}
	t.watchers.mu.Lock()
	defer t.watchers.mu.Unlock()
	for path, v := range t.watchers.listed {
		if now[path] != v {
			t.watchers.tell(Event{Removed, Report{Path: path, number: t.watchers.next()}}, v)
		}
	}
	for path, v := range now {
		if t.watchers.listed[path] != v {
			t.watchers.tell(Event{Added, t.watchers.reported(v)}, v)
		}
	}
	t.watchers.listed = now
	return nil
}

// listedAt is Lookup of a path at which one of the mounts is, and makes no goroutine for a known
// volume.
func (t *Table) listedAt(mounts *mount.List, path string) (*Volume, error) {
	if known := t.at(path); known != nil && mounts.Behind(path) == "" {
		if mark, err := mount.Look(path); err == nil && known.identity.Bears(mark) {
			return known, nil
		}
	}
	return t.Lookup(path)
}

// next returns the number of a new report. w.mu is held.
func (w *watchers) next() uint64 {
	w.number++
	return w.number
}

// Watch sends an Added event for each volume in sight, a Resynced event, and then each change,
// until ctx ends or send fails. It returns that error. If send is too slow, events are lost: then
// it sends a Resync event and begins anew. Mounts by others are seen while FollowMounts runs.
func (t *Table) Watch(ctx context.Context, send func(Event) error) error {
	one, leave := t.watchers.join("")
	defer leave()
	changes := t.changes.Next() // before the first list, so that no change is missed
	again := time.NewTicker(relistAgain)
	defer again.Stop()
	s := sender{send: send}
	if err := t.sendAll(ctx, one, &s); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changes:
			changes = t.changes.Next()
			if err := t.relist(ctx); err != nil {
				return err
			}
		case <-again.C:
			if err := t.relistAnyway(ctx, true); err != nil {
				return err
			}
		case <-one.ready:
			events, lost := t.watchers.take(one)
			for _, e := range events {
				if err := s.event(e); err != nil {
					return err
				}
			}
			if !lost {
				continue
			}
			if err := send(Event{Type: Resync}); err != nil {
				return err
			}
			if err := t.sendAll(ctx, one, &s); err != nil {
				return err
			}
		}
	}
}

// sendAll sends an Added event for each volume, and Resynced.
func (t *Table) sendAll(ctx context.Context, one *watcher, s *sender) error {
	t.watchers.take(one) // the list has all that
	reports, err := t.List(ctx)
	if err != nil {
		return err
	}
	s.sent = map[string]Report{}
	for _, r := range reports {
		if err := s.event(Event{Added, r}); err != nil {
			return err
		}
	}
	return s.send(Event{Type: Resynced})
}

// sender sends to one watcher what it does not know yet.
type sender struct {
	send func(Event) error
	sent map[string]Report // the last report, by path
}

func (s *sender) event(e Event) error {
	last, known := s.sent[e.Report.Path]
	switch {
	case known && e.Report.number <= last.number, !known && e.Type != Added: // an Added event has come later, or will
		return nil
	case e.Type == Removed:
		delete(s.sent, e.Report.Path)
		return s.send(e)
	case known:
		e.Type = Changed
	}
	s.sent[e.Report.Path] = e.Report
	if known && e.Report.same(last) { // two changes at once are in both reports
		return nil
	}
	return s.send(e)
}
