package experiments

import "testing"

// A probe every few seconds meets few fsyncs. A probe that delays each of those by a second misses the goal.
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
