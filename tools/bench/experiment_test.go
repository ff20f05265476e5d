package main

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// bench is a lab without a guest that tells a buffer what it does.
func bench(t *testing.T) (*lab, *bytes.Buffer) {
	var said bytes.Buffer
	return &lab{progress: &progress{w: &said}, whole: t.Context()}, &said
}

// measuring is an experiment of one row whose runs give the values in turn, over and over.
func measuring(name string, g goal, values ...float64) (e experiment, runs *int) {
	runs = new(int)
	return experiment{name: "measure " + name, lines: []line{{name: name, unit: "µs", goal: g}},
		open: func(context.Context, *lab, int) (session, error) {
			return session{run: func(context.Context, func(string)) (trial, error) {
				*runs++
				return trial{name: {values[*runs%len(values)]}}, nil
			}}, nil
		}}, runs
}

func TestAnUncertainRowIsMeasuredAgainWithTwiceTheRuns(t *testing.T) {
	l, said := bench(t)
	sure, sureRuns := measuring("sure", atMost(5), 1, 2)
	unsure, unsureRuns := measuring("unsure", atMost(1.5), 1, 2)
	report, err := l.measureAll(t.Context(), []experiment{sure, unsure}, 5)
	if err != nil {
		t.Fatal(err)
	}
	if *sureRuns != 5 || *unsureRuns != 15 {
		t.Errorf("runs\nwant 5 and 5 + 10\ngot  %d and %d", *sureRuns, *unsureRuns)
	}
	if row := report.Rows[1]; len(row.Runs) != 10 || !row.Uncertain {
		t.Errorf("want 10 runs, still uncertain\ngot  %+v %+v", row, row.Verdict)
	}
	if !strings.Contains(said.String(), "again, with 10 runs") {
		t.Errorf("nothing is said of it:\n%s", said)
	}
}

func TestWhatCannotBeMeasuredLeavesTheOthersAlone(t *testing.T) {
	l, _ := bench(t)
	first, _ := measuring("first", goal{}, 1)
	gone, _ := measuring("gone", goal{}, 1)
	gone.open = func(context.Context, *lab, int) (session, error) { return session{}, unavailable("install it") }
	broken, _ := measuring("broken", goal{}, 1)
	cause := errors.New("it broke")
	broken.open = func(context.Context, *lab, int) (session, error) { return session{}, cause }
	last, _ := measuring("last", goal{}, 1)
	report, err := l.measureAll(t.Context(), []experiment{first, gone, broken, last}, 5)
	if !errors.Is(err, cause) || errors.Is(err, errUnavailable) {
		t.Errorf("want only the failure\ngot  %v", err)
	}
	if got := names(report.Rows); !slices.Equal(got, []string{"first", "last"}) {
		t.Errorf("rows\nwant first, last\ngot  %v", got)
	}
	if len(report.leftOut) != 2 || !strings.Contains(report.leftOut[0], "gone: not available: install it") {
		t.Errorf("want both told, with the way out\ngot  %q", report.leftOut)
	}
}

func TestAnExperimentIsTakenDownAlsoWhenItFails(t *testing.T) {
	l, _ := bench(t)
	e, _ := measuring("row", goal{}, 1)
	closed := 0
	e.open = func(context.Context, *lab, int) (session, error) {
		return session{
			run:   func(context.Context, func(string)) (trial, error) { return trial{"other": {1}}, nil },
			close: func(context.Context) error { closed++; return nil },
		}, nil
	}
	_, err := l.measureAll(t.Context(), []experiment{e}, 5)
	if err == nil || !strings.Contains(err.Error(), "row was not measured") {
		t.Errorf("a run without the row's samples: got %v", err)
	}
	if closed != 1 {
		t.Errorf("taken down\nwant once\ngot  %d times", closed)
	}
}

func TestAnInterruptedBenchStops(t *testing.T) {
	l, _ := bench(t)
	ctx, interrupt := context.WithCancel(t.Context())
	first, _ := measuring("first", goal{}, 1)
	first.open = func(ctx context.Context, _ *lab, _ int) (session, error) {
		interrupt()
		return session{}, ctx.Err()
	}
	second, runs := measuring("second", goal{}, 1)
	report, err := l.measureAll(ctx, []experiment{first, second}, 5)
	if !errors.Is(err, context.Canceled) || *runs != 0 || len(report.Rows) != 0 {
		t.Errorf("want context.Canceled and no further run\ngot  %v, %d runs", err, *runs)
	}
}

func TestABaselineIsMeasuredWithTheRowThatWasAskedFor(t *testing.T) {
	for pattern, want := range map[string][]string{
		"^health_check_rtt$": {"health_check_rtt", "vsock_echo_rtt"},
		"^resize_xfs$":       {"resize_xfs", "vsock_echo_rtt"},
		"^vsock_echo_rtt$":   {"vsock_echo_rtt"}, // of one experiment, not of all that have it
		"boot_to_ready":      {"boot_to_mount_by_hand", "boot_to_ready"},
		"nothing is":         nil,
	} {
		got := map[string]bool{}
		experiments := chosen(regexp.MustCompile(pattern))
		for _, e := range experiments {
			for _, l := range e.lines {
				got[l.name] = true
			}
		}
		if rows := slices.Sorted(maps.Keys(got)); !slices.Equal(rows, want) || len(experiments) > 1 {
			t.Errorf("%s\nwant %v of one experiment\ngot  %v of %d", pattern, want, rows, len(experiments))
		}
	}
	if all := chosen(regexp.MustCompile("")); len(all) != len(experiments) {
		t.Errorf("every row\nwant %d experiments\ngot  %d", len(experiments), len(all))
	}
}

func names(rows []Row) (all []string) {
	for _, row := range rows {
		all = append(all, row.Name)
	}
	return all
}
