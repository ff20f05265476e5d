package measure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/directvol/directvol/protocols/output"
)

// Experiment measures several rows together, because they are measured in turn or need the same
// set-up.
type Experiment struct {
	Name  string
	Lines []Line
	// SetUpLimit limits the set-up and the clean-up, in place of the bench's; 0 means the bench's.
	SetUpLimit time.Duration
	// Open sets the experiment up for at most runs runs. An error from Unavailable omits the
	// experiment's rows, and does not count as an error of the bench.
	Open func(ctx context.Context, runs int) (Session, error)
}

// Session is an experiment that has been set up.
type Session struct {
	// Run makes one run, and reports its progress with say.
	Run func(ctx context.Context, say func(string)) (Trial, error)
	// Close cleans up after the experiment. It is nil if there is nothing to clean up.
	Close func(ctx context.Context) error
}

// Trial holds the samples of one run, by row: those of the reported rows and of their baselines.
type Trial map[string][]float64

// ErrUnavailable is wrapped by the errors that Unavailable returns.
var ErrUnavailable = errors.New("not available")

// Unavailable returns an error that says why an experiment cannot run on this machine, and how to
// change that.
func Unavailable(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrUnavailable, fmt.Errorf(format, args...))
}

// Bench runs experiments.
type Bench struct {
	Progress *output.Progress // nil shows no progress
	// SetUpLimit limits the set-up of an experiment and its clean-up, and RunLimit limits a run.
	SetUpLimit, RunLimit time.Duration
	// Failed is called after a failed experiment, before the next one. It may be nil.
	Failed func(error)
}

// Result holds everything that was measured.
type Result struct {
	Rows     []Row
	Sections []Section
	LeftOut  []Omission
}

// Section is an experiment that ran, and its total duration, including set-up and clean-up.
type Section struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
	Runs    int     `json:"runs"`
}

// Omission is an experiment that could not run, or failed.
type Omission struct {
	Lines []Line
	Why   error
}

// Measure runs each experiment the given number of times. A failed experiment omits its own rows
// and no others; Measure returns the errors at the end. If a row's target lies inside the spread of
// the runs, Measure makes as many runs again, and the row counts all of them.
func (b *Bench) Measure(ctx context.Context, all []Experiment, runs int) (*Result, error) {
	result := &Result{Rows: []Row{}}
	var failures []error
	for _, e := range all {
		began := time.Now()
		rows, made, err := b.measure(ctx, e, runs, result.Rows)
		switch {
		case ctx.Err() != nil:
			return result, err
		case errors.Is(err, ErrUnavailable):
			result.LeftOut = append(result.LeftOut, Omission{e.Lines, err})
			b.Progress.Note("%s left out: %v", e.Name, err)
		case err != nil:
			result.LeftOut = append(result.LeftOut, Omission{e.Lines, err})
			failures = append(failures, fmt.Errorf("%s: %w", e.Name, err))
			b.Progress.Note("%s failed: %v", e.Name, err)
			if b.Failed != nil {
				b.Failed(err)
			}
		}
		result.add(rows)
		result.Sections = append(result.Sections, Section{e.Name, rounded(time.Since(began).Seconds()), made})
	}
	return result, errors.Join(failures...)
}

// add adds rows that are not there yet: several experiments measure the echo, and the first one
// counts.
func (r *Result) add(rows []Row) {
	for _, row := range rows {
		if !slices.ContainsFunc(r.Rows, func(have Row) bool { return have.Name == row.Name }) {
			r.Rows = append(r.Rows, row)
		}
	}
}

// measure runs an experiment, and returns its rows and the number of runs.
func (b *Bench) measure(ctx context.Context, e Experiment, runs int, earlier []Row) (rows []Row, made int, err error) {
	step := b.Progress.Begin(e.Name)
	var outcome string
	defer func() {
		switch {
		case ctx.Err() != nil:
			outcome = "interrupted"
		case errors.Is(err, ErrUnavailable):
			outcome = "left out"
		case err != nil:
			outcome = "failed"
		}
		step.End(outcome)
	}()
	step.Say("setting up")
	s, err := b.begin(ctx, e, 2*runs)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, b.end(ctx, e, s)) }()
	var trials []Trial
	for planned := runs; ; planned = 2 * runs {
		for made = len(trials); made < planned; made++ {
			t, err := b.once(ctx, s, func(text string) { step.Say(fmt.Sprintf("run %d of %d: %s", made+1, planned, text)) })
			if err == nil {
				err = e.check(t)
			}
			if err != nil {
				return nil, made, err
			}
			trials = append(trials, t)
		}
		rows = nil
		for _, line := range e.Lines {
			rows = append(rows, Summarize(line, trials, slices.Concat(earlier, rows)))
		}
		if planned == 2*runs || !uncertain(rows) {
			break
		}
	}
	outcome = brief(rows)
	if made > runs {
		outcome += fmt.Sprintf(" (%d runs: after %d a target lay inside the spread)", made, runs)
	}
	return rows, made, nil
}

func (b *Bench) begin(ctx context.Context, e Experiment, runs int) (Session, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(e.SetUpLimit, b.SetUpLimit))
	defer cancel()
	return e.Open(ctx, runs)
}

func (b *Bench) once(ctx context.Context, s Session, say func(string)) (Trial, error) {
	ctx, cancel := context.WithTimeout(ctx, b.RunLimit)
	defer cancel()
	say("…")
	return s.Run(ctx, say)
}

// end cleans up after an experiment, unless the whole bench is ending.
func (b *Bench) end(ctx context.Context, e Experiment, s Session) error {
	if s.Close == nil || ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(e.SetUpLimit, b.SetUpLimit))
	defer cancel()
	return s.Close(ctx)
}

// check checks a trial against its rows: each needs samples, and a positive baseline if it has a
// baseline.
func (e Experiment) check(t Trial) error {
	for _, l := range e.Lines {
		if len(t[l.Name]) == 0 {
			return fmt.Errorf("%s was not measured", l.Name)
		}
		if l.Baseline != "" && Median(t[l.Baseline]) <= 0 {
			return fmt.Errorf("%s has no baseline: %s took %v", l.Name, l.Baseline, t[l.Baseline])
		}
	}
	return nil
}

// brief returns the one-line result of a step: the rows with a comparison, or all rows if there are
// none.
func brief(rows []Row) string {
	var compared, all []string
	for _, row := range rows {
		text := row.Name + " " + Quantity(row.Value, row.Unit)
		if row.Comparison != nil {
			text = row.Name + " × " + Number(row.Ratio)
			compared = append(compared, text)
		}
		all = append(all, text)
	}
	if len(compared) > 0 {
		all = compared
	}
	return strings.Join(all, ", ")
}
