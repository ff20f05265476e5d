package health

import "golang.org/x/sys/unix"

// Thresholds are the shares of a filesystem, in percent of its total, below which its available
// space or inodes are a condition; 0 means never. As in GetVolumeStats, the space that is reserved
// for root is not available.
type Thresholds struct{ Space, Inodes int }

// MaxThreshold is the largest threshold, in percent.
const MaxThreshold = 50

// A condition ends when a quarter more than the threshold is available, so that a volume that is
// filled and emptied around the threshold does not come and go: at 8 % it begins below 8 and ends
// at 10.
const endsAtQuarters = 5

// isLow reports whether available of total is below a threshold. was is the last answer.
func isLow(available, total uint64, threshold int, was bool) bool {
	if threshold == 0 || total == 0 { // btrfs counts no inodes
		return false
	}
	limit := float64(total) / 100 * float64(threshold)
	if was {
		limit = limit / 4 * endsAtQuarters
	}
	return float64(available) < limit
}

// readSpace adds to an examination's result how full the filesystem is. It is called after the
// examination has found the mount, and asks nothing of a filesystem that has failed: statfs of
// ext4, xfs and btrfs reads memory.
func readSpace(t Target, f *finding) {
	if f.failure != nil || !f.looked {
		return
	}
	for _, c := range f.conditions {
		if c.Status == Inaccessible {
			return
		}
	}
	var all unix.Statfs_t
	if err := unix.Statfs(t.Mountpoint, &all); err == nil && all.Flags&unix.ST_RDONLY == 0 { // nobody fills a read-only one
		f.space = &all
	}
}

// low returns the conditions of a filesystem that is nearly full. w.mu is not held; only the
// goroutine that looks calls it.
func (w *Watch) low(f finding) (found []Condition) {
	if f.space == nil {
		return nil
	}
	limits := w.monitor.Low
	w.lowSpace = isLow(f.space.Bavail, f.space.Blocks, limits.Space, w.lowSpace)
	w.lowInodes = isLow(f.space.Ffree, f.space.Files, limits.Inodes, w.lowInodes)
	if w.lowSpace {
		found = append(found, w.target.condition(Degraded, ReasonLowSpace, "less than %d %% of its space is available: delete files or grow the volume", limits.Space))
	}
	if w.lowInodes {
		found = append(found, w.target.condition(Degraded, ReasonLowInodes, "less than %d %% of its inodes are available: delete files or grow the volume", limits.Inodes))
	}
	return found
}

// isOfSpace reports whether a condition is no fault of the disk: the volume is examined no more
// often because of it.
func (c Condition) isOfSpace() bool {
	return c.Reason == ReasonLowSpace || c.Reason == ReasonLowInodes
}
