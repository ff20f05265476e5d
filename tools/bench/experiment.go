package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/directvol/directvol/tests/vm"
)

// experiment measures some rows together, because they are measured in turn or need the same set-up.
type experiment struct {
	name  string
	lines []line
	// open sets it up for so many runs. An error made by unavailable leaves its rows out, and is none of the bench's.
	open func(ctx context.Context, l *lab, runs int) (session, error)
}

// session is an experiment that is set up.
type session struct {
	run   func(ctx context.Context, say func(string)) (trial, error)
	close func(ctx context.Context) error // nil where nothing is to be taken down
}

// experiments are all of them, in the order that they are made in: first what needs no VM, then one guest, in which kata-agent comes last, for
// its processes stay; then guests of their own.
var experiments = []experiment{
	binarySize, systemCalls,
	roundTrips, roundTripsApart, streams, residentMemory, resizeExt4, resizeXFS, pauseExt4, pauseXFS, probeCost, besideHung, diskGrown, attach, fioCounted, fioByHand, fioShared,
	kataRoundTrips, kataRoundTripsApart, kataMemory,
	boot,
}

// chosen returns the experiments that measure a row whose name matches, with those rows and their baselines alone. An echo that is only measured
// beside something else is no reason to make an experiment.
func chosen(rows *regexp.Regexp) (all []experiment) {
	reported := map[string]bool{}
	for _, e := range experiments {
		wanted, reason := map[string]bool{}, false
		for _, l := range e.lines {
			if rows.MatchString(l.name) {
				wanted[l.name], wanted[l.baseline] = true, true
				reason = reason || !reported[l.name]
			}
		}
		if !reason {
			continue
		}
		e.lines = slices.DeleteFunc(slices.Clone(e.lines), func(l line) bool { return !wanted[l.name] })
		for _, l := range e.lines {
			reported[l.name] = true
		}
		all = append(all, e)
	}
	return all
}

// errUnavailable is wrapped by what keeps an experiment from being made here.
var errUnavailable = errors.New("not available")

// unavailable says why an experiment cannot be made, and what to do about it.
func unavailable(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errUnavailable, fmt.Errorf(format, args...))
}

// measureAll makes the experiments. One that fails takes its rows with it and no others; the errors are told at the end.
func (l *lab) measureAll(ctx context.Context, all []experiment, runs int) (*Report, error) {
	report := &Report{Rows: []Row{}}
	var failures []error
	for _, e := range all {
		rows, err := l.settle(ctx, e, runs, report.Rows)
		switch {
		case ctx.Err() != nil:
			return report, err
		case errors.Is(err, errUnavailable):
			report.leaveOut(e, err)
			l.progress.note("%s left out: %v", e.name, err)
		case err != nil:
			report.leaveOut(e, err)
			failures = append(failures, fmt.Errorf("%s: %w", e.name, err))
			l.explain(err)
			l.endGuest() // whatever state it is in: the next experiment gets a fresh one
		}
		report.add(rows)
	}
	report.Machine = l.machine
	return report, errors.Join(failures...)
}

// settle measures, and where that leaves a target inside a spread, once more with twice the runs.
func (l *lab) settle(ctx context.Context, e experiment, runs int, earlier []Row) ([]Row, error) {
	rows, err := l.measure(ctx, e, runs, earlier)
	if err != nil || !uncertain(rows) {
		return rows, err
	}
	l.progress.note("a target lies inside the spread: again, with %d runs", 2*runs)
	return l.measure(ctx, e, 2*runs, earlier)
}

// Limits that end what hangs, as bases for vm.Limit.
const (
	setUpLimit = 30 * time.Second
	runLimit   = 30 * time.Second
)

// measure makes an experiment's runs.
func (l *lab) measure(ctx context.Context, e experiment, runs int, earlier []Row) (rows []Row, err error) {
	err = l.progress.step(e.name, func(say func(string)) (err error) {
		say("setting up")
		s, err := e.begin(ctx, l, runs)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.end(ctx)) }()
		var trials []trial
		for i := range runs {
			t, err := s.once(ctx, func(text string) { say(fmt.Sprintf("run %d of %d: %s", i+1, runs, text)) })
			if err != nil {
				return err
			}
			if err := e.check(t); err != nil {
				return err
			}
			trials = append(trials, t)
		}
		for _, line := range e.lines {
			rows = append(rows, summarize(line, trials, append(earlier, rows...)))
		}
		say(brief(rows))
		return nil
	})
	return rows, err
}

func (e experiment) begin(ctx context.Context, l *lab, runs int) (session, error) {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(setUpLimit))
	defer cancel()
	return e.open(ctx, l, runs)
}

func (s session) once(ctx context.Context, say func(string)) (trial, error) {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(runLimit))
	defer cancel()
	say("…")
	return s.run(ctx, say)
}

// end takes an experiment down, unless the whole bench is being ended.
func (s session) end(ctx context.Context) error {
	if s.close == nil || ctx.Err() != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(setUpLimit))
	defer cancel()
	return s.close(ctx)
}

// check holds a trial to what the rows say: samples for each, and a baseline to divide by.
func (e experiment) check(t trial) error {
	for _, l := range e.lines {
		if len(t[l.name]) == 0 {
			return fmt.Errorf("%s was not measured", l.name)
		}
		if l.baseline != "" && median(t[l.baseline]) <= 0 {
			return fmt.Errorf("%s has no baseline: %s took %v", l.name, l.baseline, t[l.baseline])
		}
	}
	return nil
}
