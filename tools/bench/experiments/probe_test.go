package experiments

import (
	"strings"
	"testing"
)

// The row promises an image in the host's memory. Elsewhere the host's disk adds a spread, and the
// reader must know.
func TestRowOfAnImageThatIsNotInMemorySaysSo(t *testing.T) {
	for _, e := range []experiment{probeCost, boot} {
		for _, inMemory := range []bool{true, false} {
			for _, l := range e.described(inMemory) {
				want := e.inMemory && !inMemory
				if got := strings.Contains(l.What, "on the host's disk"); got != want {
					t.Errorf("%s, in memory %v\nwant a note: %v\ngot  %q", l.Name, inMemory, want, l.What)
				}
			}
		}
	}
	if !probeCost.inMemory {
		t.Error("probe_cost does not want its image in memory")
	}
}

// A probe every few seconds meets few fsyncs. A probe that delays each of those by a second misses
// the goal.
func TestProbeThatHoldsAFewFsyncsUpMissesTheGoal(t *testing.T) {
	quiet := make([]float64, 1000)
	for i := range quiet {
		quiet[i] = float64(2000 + i%300)
	}
	for _, test := range []struct {
		holdsUp float64 // in microseconds
		met     bool
	}{{0, true}, {5000, true}, {1e6, false}} {
		probed := append([]float64(nil), quiet...)
		for i := range 4 {
			probed[i*200] += test.holdsUp
		}
		goal := probeCost.lines[0].Goal
		if got := goal.Judge([]float64{mean(probed) / mean(quiet)}); got.Met != test.met {
			t.Errorf("held up for %v µs\nwant the goal met: %v\ngot  %+v", test.holdsUp, test.met, *got)
		}
	}
}
