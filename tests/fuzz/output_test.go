package fuzz

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// output is the engine's report about a run of a target.
type output struct {
	elapsed            time.Duration // the engine's clock at its last line; it continues while the engine is stopped
	ran                time.Duration // without the time in which the engine was stopped
	stopped            bool
	execs, found, held int    // executions, new inputs, all inputs
	crasher            string // the file of a failing input, relative to the package's folder
	rest               []string
}

// statusEvery is the interval of the engine's status lines (CoordinateFuzzing in
// internal/fuzz/fuzz.go). The engine counts as stopped if no line comes for twice as long.
const statusEvery = 3 * time.Second

var (
	statusLine  = regexp.MustCompile(`^fuzz: elapsed: (\S+), (?:execs: (\d+) \(\d+/sec\), new interesting: (\d+) \(total: (\d+)\))?`)
	crasherLine = regexp.MustCompile(`^\s*Failing input written to (\S+)$`)
)

// read parses one line, and reports whether it is a status line.
func (o *output) read(line string) (status bool) {
	if m := crasherLine.FindStringSubmatch(line); m != nil {
		o.crasher = m[1]
	}
	m := statusLine.FindStringSubmatch(line)
	if m == nil {
		o.rest = append(o.rest, line)
		return false
	}
	if elapsed, err := time.ParseDuration(m[1]); err == nil {
		step := elapsed - o.elapsed
		o.stopped = o.stopped || step > 2*statusEvery
		o.ran += min(step, 2*statusEvery)
		o.elapsed = elapsed
	}
	if m[2] != "" {
		o.execs, _ = strconv.Atoi(m[2])
		o.found, _ = strconv.Atoi(m[3])
		o.held, _ = strconv.Atoi(m[4])
	}
	return true
}

// tooLate reports whether the engine failed at the end of its time without a failing input: it
// mistakes its own deadline for an error (go.dev/issue/75804, in Go before 1.27).
func (o *output) tooLate() bool {
	return o.crasher == "" && strings.Contains(strings.Join(o.rest, "\n"), "\n    context deadline exceeded\n")
}

func TestEnginesOutputIsUnderstood(t *testing.T) {
	var o output
	for line := range strings.Lines(`fuzz: elapsed: 0s, gathering baseline coverage: 0/8 completed
fuzz: elapsed: 0s, gathering baseline coverage: 8/8 completed, now fuzzing with 1 workers
fuzz: elapsed: 3s, execs: 22916 (7637/sec), new interesting: 43 (total: 51)
fuzz: minimizing 64-byte failing input file
fuzz: elapsed: 6s, minimizing
fuzz: elapsed: 1m9s, execs: 98633 (9365/sec), new interesting: 84 (total: 92)
--- FAIL: FuzzStream (69.09s)
    Failing input written to testdata/fuzz/FuzzStream/ebbe8cd88a67781b
FAIL
`) {
		o.read(strings.TrimSuffix(line, "\n"))
	}
	o.rest = nil
	want := output{elapsed: 69 * time.Second, ran: 12 * time.Second, stopped: true, execs: 98633, found: 84, held: 92, crasher: "testdata/fuzz/FuzzStream/ebbe8cd88a67781b"}
	if got := o; got.tooLate() || !equal(got, want) {
		t.Errorf("\nwant %+v\ngot  %+v", want, got)
	}
}

func equal(a, b output) bool {
	return a.elapsed == b.elapsed && a.ran == b.ran && a.stopped == b.stopped && a.execs == b.execs && a.found == b.found && a.held == b.held && a.crasher == b.crasher
}

func TestDeadlineOfTheEngineIsNoFailure(t *testing.T) {
	var o output
	for line := range strings.Lines("fuzz: elapsed: 30s, execs: 1 (0/sec), new interesting: 0 (total: 1)\n--- FAIL: FuzzX (30.01s)\n    context deadline exceeded\nFAIL\n") {
		o.read(strings.TrimSuffix(line, "\n"))
	}
	if !o.tooLate() {
		t.Errorf("want it passed over\ngot  %+v", o)
	}
	if o.crasher = "testdata/fuzz/FuzzX/1"; o.tooLate() {
		t.Error("an input that failed was passed over")
	}
}
