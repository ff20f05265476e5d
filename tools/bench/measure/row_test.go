package measure

import (
	"slices"
	"testing"
)

// trials returns the runs of a row "a" and its baseline "b" with these samples.
func trials(runs ...[2][]float64) (all []Trial) {
	for _, r := range runs {
		all = append(all, Trial{"a": r[0], "b": r[1]})
	}
	return all
}

func TestARatioIsTheMedianOfTheRunsRatios(t *testing.T) {
	// The second run is twice as slow as the others, including its baseline.
	got := Summarize(Line{Name: "a", Unit: "µs", Baseline: "b"}, trials(
		[2][]float64{{10, 12, 14}, {10}},
		[2][]float64{{24, 22, 26}, {20}},
		[2][]float64{{13, 13, 13}, {10}},
	), nil)
	if want := (Comparison{"b", 1.2, 1.2, 1.3}); *got.Comparison != want {
		t.Errorf("\nwant %+v\ngot  %+v", want, *got.Comparison)
	}
	if want := []float64{12, 24, 13}; !slices.Equal(got.Runs, want) || got.N != 9 || got.Value != 13 || got.P99 != 26 {
		t.Errorf("\nwant runs %v of 9 samples, median 13, p99 26\ngot  %+v", want, got)
	}
	if got.Verdict != nil {
		t.Errorf("a row without a target has the verdict %+v", *got.Verdict)
	}
}

func TestATargetIsMetByTheMedianAndUncertainInsideTheSpread(t *testing.T) {
	runs := []float64{1.0, 1.2, 1.4}
	for _, c := range []struct {
		name string
		goal Goal
		want Verdict
	}{
		{"well below", AtMost(1.5), Verdict{1.5, true, false}},
		{"at most, inside", AtMost(1.3), Verdict{1.3, true, true}},
		{"at most, missed inside", AtMost(1.1), Verdict{1.1, false, true}},
		{"at most, missed", AtMost(0.9), Verdict{0.9, false, false}},
		{"at the median", AtMost(1.2), Verdict{1.2, true, true}},
		{"at the spread's end", AtMost(1.4), Verdict{1.4, true, false}},
		{"at least", AtLeast(0.9), Verdict{0.9, true, false}},
		{"at least, inside", AtLeast(1.1), Verdict{1.1, true, true}},
		{"at least, missed", AtLeast(1.5), Verdict{1.5, false, false}},
	} {
		if got := *c.goal.Judge(runs); got != c.want {
			t.Errorf("%s\nwant %+v\ngot  %+v", c.name, c.want, got)
		}
	}
}

func TestARivalsFigureIsTheTarget(t *testing.T) {
	l := Line{Name: "a", Baseline: "b", Goal: Behind("ours")}
	runs := trials([2][]float64{{30}, {10}}, [2][]float64{{25}, {10}})
	ours := Row{Name: "ours", Value: 700, Comparison: &Comparison{Ratio: 1.2}}
	got := Summarize(l, runs, []Row{ours})
	if want := (Verdict{Target: 1.2, Met: true}); got.Verdict == nil || *got.Verdict != want {
		t.Errorf("\nwant %+v\ngot  %+v", want, got.Verdict)
	}
	if got := Summarize(l, runs, nil); got.Verdict != nil {
		t.Errorf("a rival that was not measured gives the verdict %+v", *got.Verdict)
	}
}
