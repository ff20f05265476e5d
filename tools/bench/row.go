package main

import (
	"fmt"
	"slices"
)

// line says what a row is: what is measured, and what it is held against.
type line struct {
	name, unit, what string
	// baseline is the row that this one is divided by, measured in the same runs; "" for none.
	baseline string
	// goal is what the ratio to the baseline, or the value where there is no baseline, has to reach.
	goal goal
}

// goal is a bound, or another row that is to be beaten: this one's figure then has to be at least that one's.
type goal struct {
	bound   float64
	atLeast bool
	rival   string
}

func atMost(bound float64) goal  { return goal{bound: bound} }
func atLeast(bound float64) goal { return goal{bound: bound, atLeast: true} }
func behind(rival string) goal   { return goal{rival: rival, atLeast: true} }

func (g goal) none() bool { return g == goal{} }

// String is the goal as a table has it.
func (g goal) String() string {
	switch {
	case g.none():
		return ""
	case g.rival != "":
		return "≥ " + g.rival
	case g.atLeast:
		return fmt.Sprintf("≥ %s", number(g.bound))
	default:
		return fmt.Sprintf("≤ %s", number(g.bound))
	}
}

// Row is a line that was measured, as bench.json has it. What has no baseline has no Comparison, what has no target no Verdict.
type Row struct {
	Name  string    `json:"name"`
	Unit  string    `json:"unit"`
	Value float64   `json:"value"` // the median of all samples
	P99   float64   `json:"p99"`
	N     int       `json:"n"`
	Runs  []float64 `json:"runs"` // the median of each run
	*Comparison
	*Verdict

	line line
}

// Comparison is a row divided by its baseline, run by run: the median, the least and the largest of the runs' ratios.
type Comparison struct {
	Baseline string  `json:"baseline"`
	Ratio    float64 `json:"ratio"`
	RatioMin float64 `json:"ratio_min"`
	RatioMax float64 `json:"ratio_max"`
}

// Verdict says whether a row reached its target, and whether the target lies inside the spread of the runs, so that another time it might not.
type Verdict struct {
	Target    float64 `json:"target"`
	Met       bool    `json:"met"`
	Uncertain bool    `json:"uncertain"`
}

// trial is what one run has measured: samples by row. Beside the rows it reports it holds those that they are divided by.
type trial map[string][]float64

// summarize makes a Row of all runs. earlier are the rows so far, among them the rival that it may have.
func summarize(l line, trials []trial, earlier []Row) Row {
	r := Row{Name: l.name, Unit: l.unit, line: l}
	var all, ratios []float64
	for _, t := range trials {
		middle := median(t[l.name])
		all = append(all, t[l.name]...)
		r.Runs = append(r.Runs, middle)
		if l.baseline != "" {
			ratios = append(ratios, middle/median(t[l.baseline]))
		}
	}
	r.Value, r.P99, r.N, r.Runs = rounded(median(all)), rounded(quantile(all, 0.99)), len(all), allRounded(r.Runs)
	judged := r.Runs
	if l.baseline != "" {
		judged = ratios
		r.Comparison = &Comparison{l.baseline, rounded(median(ratios)), rounded(slices.Min(ratios)), rounded(slices.Max(ratios))}
	}
	if g, ok := l.goal.against(earlier); ok {
		r.Verdict = g.judge(judged)
	}
	return r
}

// against puts the rival's figure in for its name. It is false where there is no goal, or a rival that was not measured.
func (g goal) against(earlier []Row) (goal, bool) {
	if g.rival == "" {
		return g, !g.none()
	}
	i := slices.IndexFunc(earlier, func(r Row) bool { return r.Name == g.rival })
	if i < 0 {
		return g, false
	}
	return goal{bound: earlier[i].figure(), atLeast: g.atLeast}, true
}

// figure is what a target is compared with.
func (r Row) figure() float64 {
	if r.Comparison != nil {
		return r.Ratio
	}
	return r.Value
}

func (g goal) judge(runs []float64) *Verdict {
	figure := median(runs)
	met := figure <= g.bound
	if g.atLeast {
		met = figure >= g.bound
	}
	return &Verdict{Target: g.bound, Met: met, Uncertain: slices.Min(runs) < g.bound && g.bound < slices.Max(runs)}
}

func uncertain(rows []Row) bool {
	return slices.ContainsFunc(rows, func(r Row) bool { return r.Verdict != nil && r.Uncertain })
}
