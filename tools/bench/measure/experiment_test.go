package measure

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/directvol/directvol/protocols/output"
)

// bench returns a Bench that shows its steps in a buffer.
func bench() (*Bench, *bytes.Buffer) {
	var shown bytes.Buffer
	return &Bench{Progress: output.NewProgress(&shown), SetUpLimit: time.Minute, RunLimit: time.Minute}, &shown
}

// counts are the numbers of set-ups, runs and clean-ups of an experiment.
type counts struct{ opened, runs, closed int }

// measuring returns an experiment with one row whose runs give the values in turn, over and over.
func measuring(name string, g Goal, values ...float64) (Experiment, *counts) {
	c := &counts{}
	return Experiment{Name: "measure " + name, Lines: []Line{{Name: name, Unit: "µs", Goal: g}},
		Open: func(context.Context, int) (Session, error) {
			c.opened++
			return Session{
				Run: func(context.Context, func(string)) (Trial, error) {
					c.runs++
					return Trial{name: {values[c.runs%len(values)]}}, nil
				},
				Close: func(context.Context) error { c.closed++; return nil },
			}, nil
		}}, c
}

func TestAnUncertainRowIsMeasuredInTwiceTheRuns(t *testing.T) {
	b, shown := bench()
	sure, sureCounts := measuring("sure", AtMost(5), 1, 2)
	unsure, unsureCounts := measuring("unsure", AtMost(1.5), 1, 2)
	result, err := b.Measure(t.Context(), []Experiment{sure, unsure}, 5)
	if err != nil {
		t.Fatal(err)
	}
	if want := (counts{1, 5, 1}); *sureCounts != want {
		t.Errorf("a row that is certain\nwant %+v\ngot  %+v", want, *sureCounts)
	}
	if want := (counts{1, 10, 1}); *unsureCounts != want {
		t.Errorf("a row that is not\nwant %+v, set up once\ngot  %+v", want, *unsureCounts)
	}
	if row := result.Rows[1]; len(row.Runs) != 10 || !row.Uncertain {
		t.Errorf("want 10 runs, still uncertain\ngot  %+v %+v", row, row.Verdict)
	}
	if !strings.Contains(shown.String(), "10 runs: after 5 a target lay inside the spread") {
		t.Errorf("nothing is said of it:\n%s", shown)
	}
}

func TestEachSectionSaysHowLongItTook(t *testing.T) {
	b, _ := bench()
	first, _ := measuring("first", Goal{}, 1)
	gone, _ := measuring("gone", Goal{}, 1)
	gone.Open = func(context.Context, int) (Session, error) { return Session{}, Unavailable("install it") }
	result, err := b.Measure(t.Context(), []Experiment{first, gone}, 5)
	if err != nil {
		t.Fatal(err)
	}
	for i := range result.Sections {
		if result.Sections[i].Seconds < 0 {
			t.Errorf("it took %v s", result.Sections[i].Seconds)
		}
		result.Sections[i].Seconds = 0
	}
	if want := []Section{{"measure first", 0, 5}, {"measure gone", 0, 0}}; !slices.Equal(result.Sections, want) {
		t.Errorf("\nwant %v\ngot  %v", want, result.Sections)
	}
}

func TestAFailureTakesNoOtherRowsWithIt(t *testing.T) {
	b, _ := bench()
	failed := 0
	b.Failed = func(error) { failed++ }
	first, _ := measuring("first", Goal{}, 1)
	gone, _ := measuring("gone", Goal{}, 1)
	gone.Open = func(context.Context, int) (Session, error) { return Session{}, Unavailable("install it") }
	broken, _ := measuring("broken", Goal{}, 1)
	cause := errors.New("it broke")
	broken.Open = func(context.Context, int) (Session, error) { return Session{}, cause }
	last, _ := measuring("last", Goal{}, 1)
	result, err := b.Measure(t.Context(), []Experiment{first, gone, broken, last}, 5)
	if !errors.Is(err, cause) || errors.Is(err, ErrUnavailable) || failed != 1 {
		t.Errorf("want only the failure, and to be called for it\ngot  %v, called %d times", err, failed)
	}
	if got := names(result.Rows); !slices.Equal(got, []string{"first", "last"}) {
		t.Errorf("rows\nwant first, last\ngot  %v", got)
	}
	if out := result.LeftOut; len(out) != 2 || out[0].Lines[0].Name != "gone" || !strings.Contains(out[0].Why.Error(), "not available: install it") {
		t.Errorf("want both left out, with the way out\ngot  %v", out)
	}
}

func TestAnExperimentIsTakenDownAlsoWhenItFails(t *testing.T) {
	b, _ := bench()
	e, c := measuring("row", Goal{}, 1)
	e.Lines[0].Name = "other"
	_, err := b.Measure(t.Context(), []Experiment{e}, 5)
	if err == nil || !strings.Contains(err.Error(), "other was not measured") {
		t.Errorf("a run without the row's samples: got %v", err)
	}
	if c.closed != 1 {
		t.Errorf("taken down\nwant once\ngot  %d times", c.closed)
	}
}

func TestAnInterruptedBenchStops(t *testing.T) {
	b, _ := bench()
	ctx, interrupt := context.WithCancel(t.Context())
	first, _ := measuring("first", Goal{}, 1)
	first.Open = func(ctx context.Context, _ int) (Session, error) {
		interrupt()
		return Session{}, ctx.Err()
	}
	second, c := measuring("second", Goal{}, 1)
	result, err := b.Measure(ctx, []Experiment{first, second}, 5)
	if !errors.Is(err, context.Canceled) || c.runs != 0 || len(result.Rows) != 0 {
		t.Errorf("want context.Canceled and no further run\ngot  %v, %d runs", err, c.runs)
	}
}

func TestTheFirstEchoCounts(t *testing.T) {
	r := &Result{}
	r.add([]Row{{Name: "echo", Value: 1}, {Name: "row"}})
	r.add([]Row{{Name: "echo", Value: 99}, {Name: "new"}})
	if r.Rows[0].Value != 1 || len(r.Rows) != 3 {
		t.Errorf("want the first echo and one row more\ngot  %v", names(r.Rows))
	}
}

func names(rows []Row) (all []string) {
	for _, row := range rows {
		all = append(all, row.Name)
	}
	return all
}
