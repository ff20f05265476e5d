// Package house has the house rules as tests: which room (top-level folder) may import which,
// package comments, names and lengths, and the reason for each dependency. CONTRIBUTING.md gives
// the reasons for the rules. The figures and lists of docs/SPECIFICATION.md are compared with the
// code, and everything that it names must exist. A rule is a function from a source tree to its
// violations. Each rule is also run on small trees that break it, so that a rule that has stopped
// working is noticed.
package house
