// Package measure is how the bench measures: an experiment's runs, in turn with their baseline; more of them where a target lies inside their spread;
// the ratio of each run, their median, least and largest; and whether that meets a target. It knows neither VMs nor the rows: package experiments has
// these, and package report writes down what came of them.
package measure
