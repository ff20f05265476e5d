package health

import (
	"os"
	"strconv"
	"strings"
)

// activity tells whether a device is being written to, by the writes that the
// kernel has counted (Documentation/block/stat.rst). Failed ones count too.
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
	return parseWrites(string(text))
}

// parseWrites returns the fifth field of a stat file, write I/Os; 0 where there
// is none.
func parseWrites(text string) uint64 {
	fields := strings.Fields(text)
	if len(fields) < 5 {
		return 0
	}
	n, err := strconv.ParseUint(fields[4], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
