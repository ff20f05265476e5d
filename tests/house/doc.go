// Package house holds the house rules as tests: which room may import which, that every package says what it is, names and lengths, and what each dependency is for.
// CONTRIBUTING.md gives the reasons, and docs/SPECIFICATION.md has the promises: its figures and lists are compared with the code, and what it names has to exist. A rule is a function from a source tree to what breaks it, and each is also shown small trees that break it, so that a rule that
// has stopped looking is noticed.
package house
