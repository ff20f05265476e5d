package health

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/fanotify"
	"github.com/directvol/directvol/agent/mount"
)

// Intervals of a watch. They bound how long a fault that the kernel's log does not name stays
// unnoticed, and how much a watch writes.
const (
	activityInterval = 5 * time.Second // how often a volume that is written to is probed
	idleInterval     = 30 * time.Second
	idleLongest      = 2 * time.Hour // of a volume that nobody writes to or asks about; each interval is idleFactor times the last
	idleFactor       = 4
	sickInterval     = 5 * time.Second
	settleInterval   = time.Second           // between two looks, whatever the log says
	showInterval     = 50 * time.Millisecond // between the look at an event that finds nothing, and the next one
	slowLimit        = 5 * time.Second       // for an examination; after that the device counts as slow
	beatInterval     = time.Second           // between two looks at the request counts of all devices
	restInterval     = time.Minute           // the same, while no device has anything to do
)

// Target is the mount that a watch examines.
type Target struct {
	Mountpoint string
	FSType     string
	Device     blockdev.Device
	Mount      mount.Identity
	Options    string      // of the mount and its filesystem, as mountinfo has them (MountOptions); "" if not known
	Changed    func()      // called when the conditions, the device's size or the filesystem's end have changed; may be nil, and must not block
	Frozen     func() bool // whether a write would wait for a thaw; may be nil
	Lost       func()      // called when the target is not mounted there any more and the watch has ended; may be nil
}

// Monitor owns the watches and follows the kernel's log for all of them.
type Monitor struct {
	Low Thresholds // set before the first Watch

	log      *logrus.Entry
	remember chan struct{}
	heard    atomic.Uint64                  // the number of the last record of the kernel's log
	errors   atomic.Pointer[fanotify.Group] // of the filesystems' errors; nil if Errors does not run
	pulse    pulse
	mu       sync.Mutex
	watches  map[*Watch]struct{}
}

// NewMonitor returns a Monitor without watches. It follows the kernel's log once Run is called.
func NewMonitor(log *logrus.Entry) *Monitor {
	return &Monitor{log: log, remember: make(chan struct{}, 1), pulse: pulse{stirred: make(chan struct{}, 1)}, watches: map[*Watch]struct{}{}}
}

// Remembers delivers after some watch's Past has changed: once for all changes since the last
// receive.
func (m *Monitor) Remembers() <-chan struct{} { return m.remember }

// remembers signals a change. It never blocks.
func (m *Monitor) remembers() {
	select {
	case m.remember <- struct{}{}:
	default:
	}
}

// Heard returns the number of the last record of the kernel's log that was processed, or 0 before
// the first.
func (m *Monitor) Heard() uint64 { return m.heard.Load() }

// HearFrom makes Run start after the record that an earlier Monitor in the same boot returned from
// Heard.
func (m *Monitor) HearFrom(heard uint64) { m.heard.Store(heard) }

// Run follows the kernel's log until ctx ends, and makes the watches look whose device a line
// names. Without Run, watches look only at intervals.
func (m *Monitor) Run(ctx context.Context) error {
	err := followKmsg(ctx, m.Heard(), func(sequence uint64, message []byte) {
		said := parseLine(message)
		m.mu.Lock()
		defer m.mu.Unlock()
		changed := m.Heard() == 0
		for w := range m.watches {
			concerns := said.concernsDevice(w.target.Device)
			switch {
			case message == nil || concerns == maybe:
				w.poke()
			case concerns == yes:
				changed = w.hear(said, message) || changed
			}
		}
		if sequence != 0 {
			m.heard.Store(sequence)
		}
		if changed { // only after the record's number is stored
			m.remembers()
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("health: the kernel's log cannot be followed: %w", err)
}

// Sizes reads the size of each watched device after it has changed, until ctx ends, and makes the
// watch of a device that is gone look at once. The kernel sends a uevent for each change of a size,
// and logs no more than some of them if they come too fast (set_capacity_and_notify in
// block/genhd.c). Sizes sends no requests to devices.
func (m *Monitor) Sizes(ctx context.Context) error {
	err := blockdev.FollowChanges(ctx, func(name string) {
		for _, w := range m.all() {
			if !w.mayBeOn(name) {
				continue
			}
			w.measure(func() uint64 {
				size := w.target.Device.Reach()
				if size == 0 {
					w.hurry() // the device may be gone
				}
				return size / sectorBytes
			})
			w.sized(blockdev.Bytes("/", w.target.Device.Number))
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("health: a disk that is smaller for a moment may not be seen: %w", err)
}

// mayBeOn reports whether the watched device may change with the device of a name: it is that one,
// a partition of it, or a mapping, whose disks have other names. "" is any device.
func (w *Watch) mayBeOn(name string) bool {
	return strings.HasPrefix(w.target.Device.Name, name) || w.target.Device.IsMapping()
}

// diskStatsBytes is more than the file's size in any guest.
const diskStatsBytes = 1 << 20

func readDiskStats(file io.ReaderAt) ([]byte, error) {
	return io.ReadAll(io.NewSectionReader(file, 0, diskStatsBytes))
}

func (m *Monitor) all() []*Watch {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.watches))
}

// Watch starts to watch a target, until End. past is what an earlier watch of the same mount
// remembered, if there was one.
//
// Before Own, the watch writes nothing and opens nothing that could make an unmount fail: somebody
// else's mount is watched through the kernel's log, the counts and the metadata.
func (m *Monitor) Watch(t Target, past Past) *Watch {
	w := &Watch{
		monitor: m, target: t, past: past, activity: activity{device: t.Device.Name},
		poked: make(chan struct{}, 1), moved: make(chan struct{}, 1), written: make(chan struct{}, 1), urgent: make(chan struct{}, 1), doubted: make(chan struct{}, 1), looked: make(chan struct{}),
		options: t.Options, idle: idleInterval, bytes: blockdev.Bytes("/", t.Device.Number),
	}
	w.start()
	m.add(w)
	return w
}

func (m *Monitor) add(w *Watch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watches[w] = struct{}{}
	m.pulse.stir()
}

// End ends all watches: no disk is accessed any more. It does not block.
func (m *Monitor) End() {
	for _, w := range m.all() {
		w.End()
	}
}

// Watched returns how many watches receive lines of the kernel's log.
func (m *Monitor) Watched() int { return len(m.all()) }

func (m *Monitor) remove(w *Watch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.watches, w)
}
