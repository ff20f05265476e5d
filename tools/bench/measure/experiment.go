package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/directvol/directvol/protocols/output"
)

// Experiment measures some rows together, because they are measured in turn or need the same set-up.
type Experiment struct {
	Name  string
	Lines []Line
	// Open sets it up for at most so many runs. An error made by Unavailable leaves its rows out, and is none of the bench's.
	Open func(ctx context.Context, runs int) (Session, error)
}

// Session is an experiment that is set up.
type Session struct {
	// Run makes one run, and says how far it is.
	Run func(ctx context.Context, say func(string)) (Trial, error)
	// Close takes the experiment down. It is nil where nothing is to be taken down.
	Close func(ctx context.Context) error
}

// Trial is the samples of one run, by row. Beside the rows that are reported it holds those that they are divided by.
type Trial map[string][]float64

// ErrUnavailable is wrapped by the errors that Unavailable makes.
var ErrUnavailable = errors.New("not available")

// Unavailable says why an experiment cannot be made on this machine, and what to do about it.
func Unavailable(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrUnavailable, fmt.Errorf(format, args...))
}

// Bench makes experiments.
type Bench struct {
	Progress *output.Progress // nil shows nothing
	// SetUpLimit ends a set-up that hangs, or the taking down, and RunLimit a run.
	SetUpLimit, RunLimit time.Duration
	// Failed is called after an experiment that has failed, before the next one. It may be nil.
	Failed func(error)
}

// Result is all that was measured.
type Result struct {
	Rows     []Row
	Sections []Section
	LeftOut  []Omission
}

// Section is an experiment that was made, and the time that it took, its set-up and its end with it.
type Section struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
	Runs    int     `json:"runs"`
}

// Omission is an experiment that could not be made, or failed.
type Omission struct {
	Lines []Line
	Why   error
}

// Measure makes the experiments, each in so many runs. One that fails takes its rows with it and no others; the errors are returned at the end.
// Where the runs leave a row's target inside their spread, as many runs are made again: the row is of all of them.
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

// add adds rows that are not there yet: an echo is measured by many experiments, and the first counts.
func (r *Result) add(rows []Row) {
	for _, row := range rows {
		if !slices.ContainsFunc(r.Rows, func(have Row) bool { return have.Name == row.Name }) {
			r.Rows = append(r.Rows, row)
		}
	}
}

// measure makes an experiment, and returns its rows and how many runs were made.
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
	defer func() { err = errors.Join(err, b.end(ctx, s)) }()
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
	ctx, cancel := context.WithTimeout(ctx, b.SetUpLimit)
	defer cancel()
	return e.Open(ctx, runs)
}

func (b *Bench) once(ctx context.Context, s Session, say func(string)) (Trial, error) {
	ctx, cancel := context.WithTimeout(ctx, b.RunLimit)
	defer cancel()
	say("…")
	return s.Run(ctx, say)
}

// end takes an experiment down, unless the whole bench is being ended.
func (b *Bench) end(ctx context.Context, s Session) error {
	if s.Close == nil || ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, b.SetUpLimit)
	defer cancel()
	return s.Close(ctx)
}

// check holds a trial to what the rows say: samples for each, and a baseline to divide by.
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

// brief is the line that a step leaves: the rows that are compared, or else all of them.
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
