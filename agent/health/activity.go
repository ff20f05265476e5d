package health

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// counts are the kernel's of a device's requests (Documentation/block/stat.rst). Those
// that failed have ended, too. A flush alone is not among those in flight.
type counts struct {
	reads, writes, discards, flushes uint64 // that have ended
	inFlight                         uint64
}

func (c counts) ended() uint64 { return c.reads + c.changes() }

// changes are all that somebody has written, and none of what a watch reads.
func (c counts) changes() uint64 { return c.writes + c.discards + c.flushes }

// parseCounts reads the fields of a stat file, which /proc/diskstats has behind each
// name. Fields that a kernel does not have yet are 0.
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
	return c, true
}

// diskStats has a line for each block device, and is read without a wait for any
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
		major, err1 := strconv.ParseUint(fields[0], 10, 12) // as long as they are in the kernel (MINORBITS in include/linux/kdev_t.h)
		minor, err2 := strconv.ParseUint(fields[1], 10, 20)
		if c, ok := parseCounts(fields[3:]); ok && err1 == nil && err2 == nil {
			all[unix.Mkdev(uint32(major), uint32(minor))] = c
		}
	}
	return all
}

// activity tells whether a device is being written to, by the writes that the
// kernel has counted. Failed ones count too.
type activity struct {
	device string // the kernel's name
	writes uint64 // when the filesystem was last looked at
	busy   bool   // at the last look
}

// ownWrites is more than what a probe makes the kernel write, at once and when
// its journal is written back.
const ownWrites = 16

// looked notes that the filesystem has just been looked at. What was busy until
// then may have met its fault right after.
func (a *activity) looked() {
	writes := writesOf(a.device)
	a.busy = writes-a.writes > ownWrites
	a.writes = writes
}

// seen tells whether the device was written to since the last look, or was so
// shortly before it: its last writer may have met the fault right after.
func (a *activity) seen() bool {
	was := a.busy
	a.busy = writesOf(a.device)-a.writes > ownWrites
	return a.busy || was
}

// writesOf returns how many writes a device has ended, or 0 where it is gone.
func writesOf(device string) uint64 {
	text, err := os.ReadFile("/sys/class/block/" + device + "/stat")
	if err != nil {
		return 0
	}
	c, _ := parseCounts(strings.Fields(string(text)))
	return c.writes
}

// stall is how long a device's requests have stood still.
type stall struct {
	last  counts
	beats int  // looks at the counts, in a row, that have found requests in flight and none ended since the look before
	moved bool // at the last look
	// silent are looks in a row that have found no request ended, in flight or not.
	silent int
}

// hungBeats are so many looks, a beatInterval apart: a device hangs then.
const hungBeats = 3

// beat takes the counts as they are now. It is in doubt where writing has just stopped:
// that may be for a flush that hangs, which is not counted in flight. A read behind it is.
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
	s.moved, s.last = moves, now
	return doubt
}

// hangs reports whether requests are in flight and none has ended for a while.
func (s *stall) hangs() bool { return s.beats >= hungBeats }
