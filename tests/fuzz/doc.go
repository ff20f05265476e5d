// Package fuzz holds the campaign over every fuzz target of the repository, a
// test of `make test-long`. It looks for the targets itself, so that a new one is
// in the next campaign, and runs each for FUZZTIME (5m where it is not set) with
// one worker; as many targets run at a time as there are processors, or as go
// test's -parallel says. FUZZ is a regular expression for those to run, such as
// FUZZ='host/.*Stream'. So a campaign over all lasts about FUZZTIME times the
// targets over the processors.
//
// What it did goes to build/fuzz.md and build/fuzz.json, after each target: how
// often it was run, how many inputs were new to it, and how much of its own
// package they and its seeds cover. Targets that are left out keep the row that
// they had. An input that fails is left where `go test` finds it from then on,
// below the package's testdata/fuzz, and named: it is to be committed with the
// fix. A campaign may be stopped and continued (SIGSTOP and SIGCONT to its
// process group): the time in between does not count.
//
// The seeds of each target run with every `go test`.
package fuzz
