// Package fuzz runs every fuzz target of the repository in one test, the campaign, which is a part
// of `make test-long`. The campaign finds the targets itself, so that it includes each new target.
// Each target runs for FUZZTIME (default 5m) with one worker; as many targets run at a time as
// there are processors, or as go test's -parallel sets. FUZZ is a regular expression that selects
// targets, such as FUZZ='host/.*Stream'. A whole campaign takes about FUZZTIME times the number of
// targets, divided by the number of processors.
//
// After each target, the campaign writes the target's results to build/fuzz.md and build/fuzz.json:
// the number of runs, the number of new inputs, and how much of the target's package is covered by
// these inputs and the seeds. Targets that did not run keep their old row. A failing input is named
// and stored below the package's testdata/fuzz, where `go test` finds it from then on; commit it
// with the fix. A campaign may be stopped and continued (SIGSTOP and SIGCONT to its process group):
// the time in between does not count.
//
// The seeds of each target run with every `go test`.
package fuzz
