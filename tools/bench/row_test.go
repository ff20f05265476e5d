package main

import (
	"slices"
	"testing"
)

// trials are runs of a row "a" and its baseline "b", by their samples.
func trials(runs ...[2][]float64) (all []trial) {
	for _, r := range runs {
		all = append(all, trial{"a": r[0], "b": r[1]})
	}
	return all
}

func TestARatioIsTheMedianOfTheRunsRatios(t *testing.T) {
	// The second run is twice as slow as the others, baseline and all.
	got := summarize(line{name: "a", unit: "µs", baseline: "b"}, trials(
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
		goal goal
		want Verdict
	}{
		{"well below", atMost(1.5), Verdict{1.5, true, false}},
		{"at most, inside", atMost(1.3), Verdict{1.3, true, true}},
		{"at most, missed inside", atMost(1.1), Verdict{1.1, false, true}},
		{"at most, missed", atMost(0.9), Verdict{0.9, false, false}},
		{"at the median", atMost(1.2), Verdict{1.2, true, true}},
		{"at the spread's end", atMost(1.4), Verdict{1.4, true, false}},
		{"at least", atLeast(0.9), Verdict{0.9, true, false}},
		{"at least, inside", atLeast(1.1), Verdict{1.1, true, true}},
		{"at least, missed", atLeast(1.5), Verdict{1.5, false, false}},
	} {
		if got := *c.goal.judge(runs); got != c.want {
			t.Errorf("%s\nwant %+v\ngot  %+v", c.name, c.want, got)
		}
	}
}

func TestARivalsFigureIsTheTarget(t *testing.T) {
	l := line{name: "a", baseline: "b", goal: behind("ours")}
	runs := trials([2][]float64{{30}, {10}}, [2][]float64{{25}, {10}})
	ours := Row{Name: "ours", Value: 700, Comparison: &Comparison{Ratio: 1.2}}
	got := summarize(l, runs, []Row{ours})
	if want := (Verdict{Target: 1.2, Met: true}); got.Verdict == nil || *got.Verdict != want {
		t.Errorf("\nwant %+v\ngot  %+v", want, got.Verdict)
	}
	if got := summarize(l, runs, nil); got.Verdict != nil {
		t.Errorf("a rival that was not measured gives the verdict %+v", *got.Verdict)
	}
}

// issueRows are the names under which figures are compared from one change to the next.
var issueRows = []string{
	"vsock_8_streams", "vsock_echo_rtt", "health_check_rtt", "volume_stats_rtt", "kata_health_check_rtt", "kata_volume_stats_rtt", "agent_syscalls_per_call",
	"resize_ext4", "resize_xfs", "block_resize_to_answer", "attach_to_mounted", "boot_to_mount", "agent_binary_bytes", "agent_rss_anon_bytes",
	"fio_randread", "fio_randwrite", "fio_fsync", "fio_requests", "probe_cost", "boot_to_ready",
}

func TestEveryRowHasItsBaselineBesideItAndAName(t *testing.T) {
	seen := map[string]bool{}
	for _, e := range experiments {
		names := map[string]bool{}
		for _, l := range e.lines {
			if names[l.name] {
				t.Errorf("%s: two rows are called %s", e.name, l.name)
			}
			names[l.name], seen[l.name] = true, true
			if l.name == "" || l.unit == "" || l.what == "" {
				t.Errorf("%s: a row lacks its name, unit or words: %+v", e.name, l)
			}
		}
		for _, l := range e.lines {
			if l.baseline != "" && !names[l.baseline] {
				t.Errorf("%s: %s is divided by %q, which is not measured with it", e.name, l.name, l.baseline)
			}
			if r := l.goal.rival; r != "" && !seen[r] {
				t.Errorf("%s: %s is to be compared with %q, which is not measured before it", e.name, l.name, r)
			}
		}
	}
	for _, name := range issueRows {
		if !seen[name] {
			t.Errorf("no row is called %s", name)
		}
	}
}
