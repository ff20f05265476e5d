// Package metrics counts what the agent does, and writes the counts in Prometheus' text exposition
// format (0.0.4, https://prometheus.io/docs/instrumenting/exposition_formats/). The counters are
// atomics, so that they never block. The values of labels are fixed in the program, and never come
// from a caller.
package metrics

import (
	"strconv"
	"strings"
)

// Kinds of families.
const (
	Counter   = "counter"
	Gauge     = "gauge"
	Histogram = "histogram"
)

// Text is an exposition that is being written. Its zero value is empty. The samples of a family
// must directly follow it.
type Text struct{ b strings.Builder }

// Family begins the samples of a metric with its help text and its kind.
func (t *Text) Family(name, kind, help string) {
	t.b.WriteString("# HELP " + name + " " + helpEscapes.Replace(help) + "\n# TYPE " + name + " " + kind + "\n")
}

// Sample adds one value. labels are alternating names and values.
func (t *Text) Sample(name string, value float64, labels ...string) {
	t.b.WriteString(name)
	for i := 0; i+1 < len(labels); i += 2 {
		separator := byte(',')
		if i == 0 {
			separator = '{'
		}
		t.b.WriteByte(separator)
		t.b.WriteString(labels[i] + `="` + labelEscapes.Replace(labels[i+1]) + `"`)
	}
	if len(labels) > 1 {
		t.b.WriteByte('}')
	}
	t.b.WriteString(" " + number(value) + "\n")
}

// One adds a family with one sample.
func (t *Text) One(name, kind, help string, value float64) {
	t.Family(name, kind, help)
	t.Sample(name, value)
}

// String returns the text written so far.
func (t *Text) String() string { return t.b.String() }

var (
	helpEscapes  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

// number writes whole numbers without an exponent, for human readers.
func number(value float64) string {
	if whole := int64(value); float64(whole) == value {
		return strconv.FormatInt(whole, 10)
	}
	return strconv.FormatFloat(value, 'g', -1, 64)
}
