package health

import (
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// counts are the kernel's counters of a device's requests (Documentation/block/stat.rst). Failed
// requests count as ended, too. A flush alone is not counted in flight.
type counts struct {
	reads, writes, discards, flushes uint64 // that have ended
	inFlight                         uint64
	reading, writing, flushing       uint64 // milliseconds, of all that have ended together; discards are writing
}

func (c counts) ended() uint64 { return c.reads + c.changes() }

// changes counts everything that writes, so that a watch's own reads do not count.
func (c counts) changes() uint64 { return c.writes + c.discards + c.flushes }

// parseCounts parses the fields of a stat file, which /proc/diskstats has after each name. Fields
// that an older kernel does not have are 0.
func parseCounts(fields []string) (c counts, ok bool) {
	if len(fields) < 11 {
		return counts{}, false
	}
	for at, count := range map[int]*uint64{0: &c.reads, 4: &c.writes, 8: &c.inFlight, 11: &c.discards, 15: &c.flushes} {
		if at >= len(fields) {
			continue
		}
		n, err := strconv.ParseUint(fields[at], 10, 64)
		if err != nil {
			return counts{}, false
		}
		*count = n
	}
	for at, sum := range map[int]*uint64{3: &c.reading, 7: &c.writing, 14: &c.writing, 16: &c.flushing} {
		if at >= len(fields) {
			continue
		}
		n, err := strconv.ParseUint(fields[at], 10, 64)
		if err != nil {
			return counts{}, false
		}
		*sum += n
	}
	return c, true
}

// A disk that has ended quickRequests since an examination began, in less than quickLimit each on
// average, is not why that examination takes slowLimit: it makes fewer requests than would need.
// Reads and writes are compared apart, because a cache of the host may answer many reads of a disk
// that is slow to write; a few that together take no longer than so many quick ones do not count.
// Flushes are compared apart, with quickFlush, because a healthy disk may write back much in one.
// Among many quick writes, a few flushes that take seconds would not show in one average.
const (
	quickRequests = 4
	quickLimit    = 250 * time.Millisecond
	quickFlush    = time.Second
)

// isQuick reports whether a device has ended some requests since earlier counts, and soon. Then a
// late examination waits for something else, such as a processor or a filesystem's own queue.
func (c counts) isQuick(since counts) bool {
	if c.reads < since.reads || c.writes < since.writes || c.discards < since.discards || c.flushes < since.flushes ||
		c.reading < since.reading || c.writing < since.writing || c.flushing < since.flushing {
		return false // the device is gone, or its counts have begun anew
	}
	reads, flushes := c.reads-since.reads, c.flushes-since.flushes
	writes := c.writes + c.discards - since.writes - since.discards
	return reads+writes+flushes >= quickRequests &&
		isMeanBelow(quickLimit, c.reading-since.reading, max(reads, quickRequests)) &&
		isMeanBelow(quickLimit, c.writing-since.writing, max(writes, quickRequests)) &&
		isMeanBelow(quickFlush, c.flushing-since.flushing, flushes)
}

// isMeanBelow reports whether n requests, if any, took less than limit on average: milliseconds
// together.
func isMeanBelow(limit time.Duration, milliseconds, n uint64) bool {
	return n == 0 || milliseconds/n < uint64(limit.Milliseconds())
}

// diskStats has a line for each block device. Reading it does not wait for any device
// (Documentation/admin-guide/iostats.rst).
const diskStats = "/proc/diskstats"

// parseDiskStats returns the counts of all devices, by dev_t.
func parseDiskStats(text string) map[uint64]counts {
	all := map[uint64]counts{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 3 {
			continue
		}
		major, err1 := strconv.ParseUint(fields[0], 10, 12) // as many bits as in the kernel (MINORBITS in include/linux/kdev_t.h)
		minor, err2 := strconv.ParseUint(fields[1], 10, 20)
		if c, ok := parseCounts(fields[3:]); ok && err1 == nil && err2 == nil {
			all[unix.Mkdev(uint32(major), uint32(minor))] = c
		}
	}
	return all
}

// activity tracks whether a device is being written to, by the kernel's count of writes, including
// failed ones.
type activity struct {
	device string    // the kernel's name
	at     time.Time // of the last look at the filesystem; zero before the first
	writes uint64    // at the last look
	busy   bool      // the device was written to between the last two looks
}

// ownWrites is more than the number of writes that a probe causes, at once and when its journal is
// written back.
const ownWrites = 16

// looked notes that the filesystem has just been examined. A device that was busy until then may
// have met a fault right afterwards.
func (a *activity) looked() {
	writes := countsOf(a.device).writes
	a.busy = writes-a.writes > ownWrites
	a.writes, a.at = writes, time.Now()
}

// isDue reports whether it is time to look at a filesystem whose device has ended so many writes:
// it was written to since the last look, or shortly before it, so that the last write may have met
// the fault right after that look.
func (a *activity) isDue(writes uint64) bool {
	return a.isOlder(activityInterval) && (a.busy || writes > a.writes+ownWrites)
}

// isOlder reports whether the last look was so long ago.
func (a *activity) isOlder(than time.Duration) bool {
	return !a.at.IsZero() && time.Since(a.at) >= than
}

// countsOf returns the counts of a device, or none if the device is gone.
func countsOf(device string) counts {
	text, err := os.ReadFile("/sys/class/block/" + device + "/stat")
	if err != nil {
		return counts{}
	}
	c, _ := parseCounts(strings.Fields(string(text)))
	return c
}

// stall tracks for how long a device has ended no request.
type stall struct {
	last  counts
	beats int  // looks in a row that found requests in flight and none ended since the look before
	moved bool // at the last look
	// silent counts looks in a row that found no request ended, whether or not any were in flight.
	silent int
	asked  bool // a read was sent since a write, a discard or a flush last ended
}

// hungBeats is how many such looks, a beatInterval apart, mean that a device hangs.
const hungBeats = 3

// beat processes the current counts. doubt is set if writing has just stopped: the cause may be a
// flush that hangs, which is not counted in flight. A read after the flush is counted.
func (s *stall) beat(now counts) (doubt bool) {
	switch {
	case now.inFlight == 0 || now.ended() != s.last.ended():
		s.beats = 0
	case s.last.inFlight > 0:
		s.beats++
	}
	if s.silent++; now.ended() != s.last.ended() {
		s.silent = 0
	}
	moves := now.changes() != s.last.changes()
	doubt = s.moved && !moves
	s.asked = s.asked && !moves
	s.moved, s.last = moves, now
	return doubt
}

// isUnknown reports whether the counts do not show if the device answers, and one read may show it:
// nothing is in flight, and nothing has ended for a beat. One read is enough: if that ends, the
// device answers.
func (s *stall) isUnknown() bool { return s.last.inFlight == 0 && s.silent > 0 && !s.asked }

// hangs reports whether requests are in flight and none has ended for a while.
func (s *stall) hangs() bool { return s.beats >= hungBeats }
