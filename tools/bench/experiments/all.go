package experiments

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
)

// experiment measures some rows in a setup.
type experiment struct {
	name  string
	lines []measure.Line
	// open sets the experiment up for at most runs runs.
	open func(ctx context.Context, l *Setup, runs int) (measure.Session, error)
	// setUp is a base for vm.Limit of the set-up; 0 means setUpLimit.
	setUp time.Duration
	// inMemory is true if the image of its disk should lie in the host's memory.
	inMemory bool
}

// described returns the experiment's rows. Their text says if an image that should lie in memory
// does not.
func (e experiment) described(imagesInMemory bool) []measure.Line {
	if !e.inMemory || imagesInMemory {
		return e.lines
	}
	lines := slices.Clone(e.lines)
	for i := range lines {
		lines[i].What += "; the image lies on the host's disk, as " + memory + " is not a filesystem in memory that can hold it"
	}
	return lines
}

// all lists the experiments in the order in which they run: first those that need no VM; then those
// in the shared guest, with kata-agent last, because its processes stay; then those with guests of
// their own.
var all = []experiment{
	binarySize, systemCalls,
	roundTrips, roundTripsApart, streams, residentMemory, resizeExt4, resizeXFS, pauseExt4, pauseXFS, growExt4, growXFS, growBtrfs, probeCost, conditionLatency, besideHung, stuckThreads, diskGrown, attach, fioCounted, fioByHand, fioShared,
	kataRoundTrips, kataRoundTripsApart, kataMemory,
	boot, idleWakeUps, many,
}

// Lines returns the rows of all experiments, each once.
func Lines() (lines []measure.Line) {
	seen := map[string]bool{} // several experiments measure the echo
	for _, e := range all {
		for _, l := range e.lines {
			if !seen[l.Name] {
				lines = append(lines, l)
			}
			seen[l.Name] = true
		}
	}
	return lines
}

// Experiments returns the experiments that measure a wanted row, to be run in the setup, with only
// these rows and their baselines. If several experiments measure a wanted echo, only the first of
// them runs for the echo's sake.
func (l *Setup) Experiments(wanted func(row string) bool) (some []measure.Experiment) {
	for _, e := range chosen(wanted) {
		some = append(some, measure.Experiment{Name: e.name, Lines: e.described(l.inMemory), SetUpLimit: vm.Limit(cmp.Or(e.setUp, setUpLimit)), Open: func(ctx context.Context, runs int) (measure.Session, error) {
			return e.open(ctx, l, runs)
		}})
	}
	return some
}

func chosen(row func(string) bool) (some []experiment) {
	reported := map[string]bool{}
	for _, e := range all {
		wanted, reason := map[string]bool{}, false
		for _, l := range e.lines {
			if row(l.Name) {
				wanted[l.Name], wanted[l.Baseline] = true, true
				reason = reason || !reported[l.Name]
			}
		}
		if !reason {
			continue
		}
		e.lines = slices.DeleteFunc(slices.Clone(e.lines), func(l measure.Line) bool { return !wanted[l.Name] })
		for _, l := range e.lines {
			reported[l.Name] = true
		}
		some = append(some, e)
	}
	return some
}
