package metrics

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
)

// statusFile shows what this process uses (proc_pid_status(5)).
const statusFile = "/proc/self/status"

// WriteProcess adds this process's use of the guest's memory, and the number of its goroutines and
// threads.
func WriteProcess(t *Text) error {
	text, err := os.ReadFile(statusFile)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		key, unit  string
		name, help string
		scale      float64
	}{
		{"RssAnon", "kB", "directvol_agent_anonymous_memory_bytes", "Anonymous memory of this process (RssAnon).", 1024},
		{"VmRSS", "kB", "directvol_agent_resident_memory_bytes", "Resident memory of this process, its program included (VmRSS).", 1024},
		{"Threads", "", "directvol_agent_threads", "Threads of this process.", 1},
	} {
		value, err := statusField(string(text), f.key, f.unit)
		if err != nil {
			return fmt.Errorf("%s: %w", statusFile, err)
		}
		t.One(f.name, Gauge, f.help, float64(value)*f.scale)
	}
	t.One("directvol_agent_goroutines", Gauge, "Goroutines of this process.", float64(runtime.NumGoroutine()))
	return nil
}

// statusField parses the line "Key: number unit".
func statusField(text, key, unit string) (uint64, error) {
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(line, ":")
		if !ok || name != key {
			continue
		}
		value, ok = strings.CutSuffix(strings.TrimSpace(value), unit)
		n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 48)
		if !ok || err != nil {
			return 0, fmt.Errorf("%.80q is not a number of %s", line, unit)
		}
		return n, nil
	}
	return 0, fmt.Errorf("no line %s", key)
}
