package health

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/agent/blockdev"
	"github.com/directvol/directvol/agent/mount"
)

// Intervals of a watch. They bound how long a fault that the kernel's log does
// not name stays unseen, and how much a watch writes itself.
const (
	activityInterval = 5 * time.Second // a volume that is written to is probed as often
	idleInterval     = 30 * time.Second
	sickInterval     = 5 * time.Second
	settleInterval   = time.Second     // between two looks, whatever the log says
	slowLimit        = 5 * time.Second // for an examination; then the device is slow
	beatInterval     = time.Second     // between two looks at the counts of all devices' requests
)

// Target is what a watch looks at.
type Target struct {
	Mountpoint string
	FSType     string
	Device     blockdev.Device
	Mount      mount.Identity
	Lost       func() // called where it is not mounted there any more; the watch has ended then. Nil for nobody
}

// Monitor owns the watches and follows the kernel's log for all of them.
type Monitor struct {
	log      *logrus.Entry
	remember chan struct{}
	heard    atomic.Uint64 // the number of the last record of the kernel's log
	mu       sync.Mutex
	watches  map[*Watch]struct{}
}

// NewMonitor returns a Monitor without watches. Run makes it listen.
func NewMonitor(log *logrus.Entry) *Monitor {
	return &Monitor{log: log, remember: make(chan struct{}, 1), watches: map[*Watch]struct{}{}}
}

// Remembers delivers after some watch's Past has changed: once for all that has
// changed since it was last read.
func (m *Monitor) Remembers() <-chan struct{} { return m.remember }

// remembers never blocks, whether anybody reads or not.
func (m *Monitor) remembers() {
	select {
	case m.remember <- struct{}{}:
	default:
	}
}

// Heard returns the number of the last record of the kernel's log that was
// followed, 0 before the first.
func (m *Monitor) Heard() uint64 { return m.heard.Load() }

// HearFrom has Run begin behind a record that a Monitor before this one has
// Heard, in the same boot.
func (m *Monitor) HearFrom(heard uint64) { m.heard.Store(heard) }

// Run follows the kernel's log until ctx ends and has the watches look whose
// device it names. Without it they look at intervals only.
func (m *Monitor) Run(ctx context.Context) error {
	err := followKmsg(ctx, m.Heard(), func(sequence uint64, message []byte) {
		said := parseLine(message)
		m.mu.Lock()
		defer m.mu.Unlock()
		changed := m.Heard() == 0
		for w := range m.watches {
			device := w.target.Device
			concerns := said.concerns(device.Name, func() (blockdev.Partition, bool) { return blockdev.PartitionOf("/", device.Number) })
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
		if changed { // not before the number behind it is known
			m.remembers()
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("health: the kernel's log cannot be followed: %w", err)
}

// Beat looks at the counts of all devices' requests, again and again until ctx ends: the
// kernel has no event for a device that does not answer. It makes no request itself.
func (m *Monitor) Beat(ctx context.Context) error {
	file, err := os.Open(diskStats)
	if err != nil {
		return fmt.Errorf("health: a disk that hangs is not seen: %w", err)
	}
	defer file.Close()
	again := time.NewTicker(beatInterval)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-again.C:
		}
		watches := m.all()
		if len(watches) == 0 {
			continue
		}
		text, err := io.ReadAll(io.NewSectionReader(file, 0, diskStatsBytes))
		if err != nil {
			return fmt.Errorf("health: a disk that hangs is not seen any more: %w", err)
		}
		now := parseDiskStats(string(text))
		for _, w := range watches {
			c, there := now[w.target.Device.Number]
			w.beat(c, there)
		}
	}
}

// diskStatsBytes is more than any guest's devices need.
const diskStatsBytes = 1 << 20

func (m *Monitor) all() []*Watch {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.watches))
}

// Watch starts to watch a target, until End. past is what a watch before it
// remembered of the same mount, if there was one.
//
// It writes nothing, and opens nothing that an unmount would meet, before Own: a mount
// that is somebody else's is watched by the kernel's log, its counts, and its metadata.
func (m *Monitor) Watch(t Target, past Past) *Watch {
	w := &Watch{
		monitor: m, target: t, past: past, activity: activity{device: t.Device.Name},
		poked: make(chan struct{}, 1), doubted: make(chan struct{}, 1), looked: make(chan struct{}),
	}
	w.start()
	m.add(w)
	return w
}

func (m *Monitor) add(w *Watch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watches[w] = struct{}{}
}

// End ends all watches: nothing is asked of a disk any more. It waits for nobody.
func (m *Monitor) End() {
	for _, w := range m.all() {
		w.End()
	}
}

// Watched returns how many watches hear the kernel's log.
func (m *Monitor) Watched() int { return len(m.all()) }

func (m *Monitor) remove(w *Watch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.watches, w)
}
