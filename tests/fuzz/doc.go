// Package fuzz holds the campaign that runs every fuzz target of the repository, a test of `make
// test-long`. It finds the targets itself, so that a new target is part of the next campaign. Each
// target runs for FUZZTIME (default 5m) with one worker; as many targets run at a time as there are
// processors, or as go test's -parallel sets. FUZZ is a regular expression that selects targets,
// such as FUZZ='host/.*Stream'. A whole campaign takes about FUZZTIME times the number of targets,
// divided by the number of processors.
//
// After each target, the campaign writes its results to build/fuzz.md and build/fuzz.json: the
// number of runs, the number of new inputs, and the part of the target's package that these and its
// seeds cover. Targets that did not run keep their old row. A failing input is named and stored
// below the package's testdata/fuzz, where `go test` finds it from then on; commit it with the fix.
// A campaign may be stopped and continued (SIGSTOP and SIGCONT to its process group): the time in
// between does not count.
//
// The seeds of each target run with every `go test`.
package fuzz
