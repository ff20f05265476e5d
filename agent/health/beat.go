package health

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// pulse is how often Beat looks. Beat looks every restInterval when its last looks have found
// nothing to do, if the kernel says when a program begins to wait for a disk; else every
// beatInterval.
type pulse struct {
	stirred  chan struct{} // a reason to look every beatInterval again
	resting  atomic.Bool
	followed atomic.Bool // the kernel says when a program waits
}

const (
	// restAfter is how many looks in a row find nothing before Beat rests.
	restAfter = 5
	// restRequests is more than the requests of an examination: so many between two looks do not
	// end Beat's rest.
	restRequests = 64
)

// stir ends Beat's rest. It never blocks.
func (p *pulse) stir() {
	if p.resting.Load() {
		deliver(p.stirred)
	}
}

// Beat reads the request counts of all devices every beatInterval until ctx ends, because the
// kernel has no event for a device that does not answer. It sends no requests to devices. While no
// device has anything to do, Beat reads them every restInterval, so that an idle guest stays idle:
// a program that waits for a disk, a call that waits for one and a slow examination end the rest.
func (m *Monitor) Beat(ctx context.Context) error {
	file, err := os.Open(diskStats)
	if err != nil {
		return fmt.Errorf("health: hung disks are not detected: %w", err)
	}
	defer file.Close()
	go func() {
		if err := m.pulse.follow(ctx); ctx.Err() == nil {
			m.log.Infof("health: the agent looks at the disks every %v, also when they are idle: %v", beatInterval, err)
		}
	}()
	return m.beats(ctx, func() ([]byte, error) { return readDiskStats(file) })
}

// beats is Beat, with a function that reads diskStats.
func (m *Monitor) beats(ctx context.Context, read func() ([]byte, error)) error {
	again := time.NewTimer(beatInterval)
	defer again.Stop()
	for quiet := 0; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.pulse.stirred:
			m.pulse.resting.Store(false)
			quiet = 0
			again.Reset(beatInterval)
			continue
		case <-again.C:
		}
		rested := m.pulse.resting.Swap(true) // before the look, so that what begins during it is not missed
		active, err := m.beat(read, rested)
		if err != nil {
			return fmt.Errorf("health: hung disks are no longer detected: %w", err)
		}
		if quiet++; active {
			quiet = 0
		}
		if quiet >= restAfter && m.pulse.followed.Load() || rested && !active {
			again.Reset(restInterval)
			continue
		}
		m.pulse.resting.Store(false)
		again.Reset(beatInterval)
	}
}

// beat makes all watches look at their device's counts. active is set if a device has something to
// do.
func (m *Monitor) beat(read func() ([]byte, error), rested bool) (active bool, err error) {
	watches := m.all()
	if len(watches) == 0 {
		return false, nil
	}
	text, err := read()
	if err != nil {
		return false, err
	}
	few := uint64(0)
	if rested {
		few = restRequests
	}
	now := parseDiskStats(string(text))
	for _, w := range watches {
		c, there := now[w.target.Device.Number]
		ended, busy := w.beat(c, there)
		active = active || busy || ended > few
	}
	return active, nil
}

// pressureFile has the time that programs wait for disks, and pressureTrigger makes the kernel
// announce 100 ms of that in a second (Documentation/accounting/psi.rst).
const pressureFile, pressureTrigger = "/proc/pressure/io", "some 100000 1000000\x00"

// follow ends Beat's rest when a program begins to wait for a disk, until ctx ends. It fails if the
// kernel does not announce that.
func (p *pulse) follow(ctx context.Context) error {
	file, err := os.OpenFile(pressureFile, os.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := file.WriteString(pressureTrigger); err != nil {
		return err
	}
	if err := file.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("%s cannot be polled: %w", pressureFile, err)
	}
	defer context.AfterFunc(ctx, func() { file.SetReadDeadline(time.Unix(1, 0)) })()
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	p.followed.Store(true)
	defer p.stir()
	defer p.followed.Store(false)
	for {
		waited := false
		err := raw.Read(func(uintptr) bool {
			was := waited
			waited = true
			return was
		})
		if err != nil {
			return errors.Join(ctx.Err(), err)
		}
		p.stir()
	}
}
