package measure

import (
	"fmt"
	"slices"
)

// Line describes a row: what is measured, its baseline and its goal.
type Line struct {
	Name, Unit, What string
	// Baseline is the row that this row is divided by, measured in the same runs; "" means none.
	Baseline string
	// Goal applies to the ratio to the baseline, or to the value of a row without a baseline.
	Goal Goal
}

// Goal is a bound, or another row that this row must beat. The zero value is no goal.
type Goal struct {
	bound   float64
	atLeast bool
	rival   string
}

// AtMost is the goal of a figure that must not exceed the bound.
func AtMost(bound float64) Goal { return Goal{bound: bound} }

// AtLeast is the goal of a figure that must not be below the bound.
func AtLeast(bound float64) Goal { return Goal{bound: bound, atLeast: true} }

// Behind is the goal of a figure that must not be below the figure of the rival, a row that is
// measured earlier.
func Behind(rival string) Goal { return Goal{rival: rival, atLeast: true} }

// None reports whether there is no goal.
func (g Goal) None() bool { return g == Goal{} }

// Rival returns the name of the row to beat, or "" if the goal is a bound.
func (g Goal) Rival() string { return g.rival }

// String formats the goal for a table.
func (g Goal) String() string {
	switch {
	case g.None():
		return ""
	case g.rival != "":
		return "≥ " + g.rival
	case g.atLeast:
		return fmt.Sprintf("≥ %s", Number(g.bound))
	default:
		return fmt.Sprintf("≤ %s", Number(g.bound))
	}
}

// Row is a measured line, as in bench.json. A row without a baseline has no Comparison, and a row
// without a target no Verdict.
type Row struct {
	Name  string    `json:"name"`
	Unit  string    `json:"unit"`
	Value float64   `json:"value"` // the median of all samples
	P99   float64   `json:"p99"`
	N     int       `json:"n"`
	Runs  []float64 `json:"runs"` // the median of each run
	*Comparison
	*Verdict

	Line Line `json:"-"`
}

// Comparison is a row divided by its baseline, run by run: the median, the least and the largest
// ratio of the runs.
type Comparison struct {
	Baseline string  `json:"baseline"`
	Ratio    float64 `json:"ratio"`
	RatioMin float64 `json:"ratio_min"`
	RatioMax float64 `json:"ratio_max"`
}

// Verdict says whether a row reached its target, and whether the target lies inside the spread of
// the runs, so that another measurement may decide differently.
type Verdict struct {
	Target    float64 `json:"target"`
	Met       bool    `json:"met"`
	Uncertain bool    `json:"uncertain"`
}

// Summarize computes a Row from all runs. earlier are the rows measured so far, which include the
// row's rival if it has one.
func Summarize(l Line, trials []Trial, earlier []Row) Row {
	r := Row{Name: l.Name, Unit: l.Unit, Line: l}
	var all, ratios []float64
	for _, t := range trials {
		middle := Median(t[l.Name])
		all = append(all, t[l.Name]...)
		r.Runs = append(r.Runs, middle)
		if l.Baseline != "" {
			ratios = append(ratios, middle/Median(t[l.Baseline]))
		}
	}
	r.Value, r.P99, r.N, r.Runs = rounded(Median(all)), rounded(Quantile(all, 0.99)), len(all), allRounded(r.Runs)
	judged := r.Runs
	if l.Baseline != "" {
		judged = ratios
		r.Comparison = &Comparison{l.Baseline, rounded(Median(ratios)), rounded(slices.Min(ratios)), rounded(slices.Max(ratios))}
	}
	if g, ok := l.Goal.against(earlier); ok {
		r.Verdict = g.Judge(judged)
	}
	return r
}

// against replaces the rival's name with its figure. It returns false if there is no goal, or if
// the rival was not measured.
func (g Goal) against(earlier []Row) (Goal, bool) {
	if g.rival == "" {
		return g, !g.None()
	}
	i := slices.IndexFunc(earlier, func(r Row) bool { return r.Name == g.rival })
	if i < 0 {
		return g, false
	}
	return Goal{bound: earlier[i].Figure(), atLeast: g.atLeast}, true
}

// Figure returns the figure that is compared with the target: the ratio, or the value of a row
// without a baseline.
func (r Row) Figure() float64 {
	if r.Comparison != nil {
		return r.Ratio
	}
	return r.Value
}

// Judge compares the median of the runs, of their ratios or of their values, with a bound.
func (g Goal) Judge(runs []float64) *Verdict {
	figure := Median(runs)
	met := figure <= g.bound
	if g.atLeast {
		met = figure >= g.bound
	}
	return &Verdict{Target: g.bound, Met: met, Uncertain: slices.Min(runs) < g.bound && g.bound < slices.Max(runs)}
}

func uncertain(rows []Row) bool {
	return slices.ContainsFunc(rows, func(r Row) bool { return r.Verdict != nil && r.Uncertain })
}

// With formats the goal for a table, with the figure of the rival in place of its name.
func (g Goal) With(target float64) string {
	if g.rival == "" {
		return g.String()
	}
	return fmt.Sprintf("%s (%s)", g, Number(target))
}

// String formats the verdict in a word or two.
func (v Verdict) String() string {
	text := "not met"
	if v.Met {
		text = "met"
	}
	if v.Uncertain {
		text += ", uncertain"
	}
	return text
}
