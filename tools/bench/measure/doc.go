// Package measure has the bench's method: it runs experiments in turn with their baselines, makes
// more runs if a target lies inside the spread, computes the ratio of each run with the median, the
// least and the largest ratio, and compares the result with the target. It knows neither VMs nor
// the rows: these are in package experiments, and package report writes the results.
package measure
