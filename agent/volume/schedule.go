package volume

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/health"
)

// A disk is busy if it ends more than busyRequests in busyLook. A volume whose disk is busy is
// looked at again after busyPause, busyLooks times in all, and then skipped.
const (
	busyLook     = 10 * time.Second
	busyRequests = 500
	busyPause    = time.Hour
	busyLooks    = 8
)

// TrimEvery trims each owned volume once in an interval, one at a time, until ctx ends. The first
// time is a random part of the interval away, so that guests which were started together do not
// trim together. A volume with a condition is skipped, and so is one whose disk takes no discards
// or is busy. Each trim is logged. Between two rounds nothing runs. An interval of 0 means never.
func (t *Table) TrimEvery(ctx context.Context, interval time.Duration, log *logrus.Entry) {
	s := schedule{table: t, log: log, look: busyLook, again: min(busyPause, interval), ended: health.Ended}
	for first := true; interval > 0; first = false {
		wait := interval
		if first {
			wait = rand.N(interval)
		}
		if !pause(ctx, wait) {
			return
		}
		s.round(ctx)
	}
}

// schedule trims the owned volumes of a table. ended counts the requests that a disk has ended.
type schedule struct {
	table       *Table
	log         *logrus.Entry
	look, again time.Duration // busyLook and busyPause
	ended       func(device uint64) uint64
}

// pause waits, and reports whether ctx goes on.
func pause(ctx context.Context, wait time.Duration) bool {
	end := time.NewTimer(wait)
	defer end.Stop()
	select {
	case <-ctx.Done():
	case <-end.C:
	}
	return ctx.Err() == nil
}

// round trims the volumes that are owned now.
func (s *schedule) round(ctx context.Context) {
	left := s.table.ownedDisks()
	for look := 1; ; look++ {
		left = slices.DeleteFunc(left, func(v *Volume) bool { return ctx.Err() != nil || !s.trim(ctx, v) })
		if len(left) == 0 {
			return
		}
		if look == busyLooks {
			break
		}
		if !pause(ctx, s.again) {
			return
		}
	}
	for _, v := range left {
		s.entry(v).Info("volume not trimmed: its disk is busy")
	}
}

// ownedDisks returns one owned volume of each disk, sorted by path.
func (t *Table) ownedDisks() (owned []*Volume) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, v := range t.volumes {
		if v.Owned() && !slices.ContainsFunc(owned, func(o *Volume) bool { return o.Device.Number == v.Device.Number }) {
			owned = append(owned, v)
		}
	}
	slices.SortFunc(owned, func(a, b *Volume) int { return cmp.Compare(a.Mountpoint, b.Mountpoint) })
	return owned
}

// trim trims a volume if it is healthy, and logs the result. busy means that its disk has other
// work.
func (s *schedule) trim(ctx context.Context, v *Volume) (busy bool) {
	before := s.ended(v.Device.Number)
	if !v.isHealthy() || !pause(ctx, s.look) || !v.isHealthy() {
		return false
	}
	if s.ended(v.Device.Number)-before > busyRequests {
		return true
	}
	if s.table.at(v.Mountpoint) != v { // it was unmounted meanwhile
		return false
	}
	trimmed, err := s.table.Trim(ctx, v.Mountpoint, 0)
	switch {
	case err == nil:
		s.entry(v).WithField("bytes", trimmed).Info("volume trimmed: its free blocks were given back")
	case errors.Is(err, unix.EOPNOTSUPP):
		s.entry(v).Debugf("volume not trimmed: %v", err)
	default:
		s.entry(v).Warnf("volume not trimmed: %v", err)
	}
	return false
}

// isHealthy reports whether the volume was examined and has no condition.
func (v *Volume) isHealthy() bool {
	conditions, examined := v.watch.Latest()
	return examined && len(conditions) == 0
}

// entry returns a log entry with a volume's fields.
func (s *schedule) entry(v *Volume) *logrus.Entry {
	return s.log.WithFields(logrus.Fields{"mountpoint": v.Mountpoint, "device": v.Device.Path})
}
