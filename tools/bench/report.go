package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Report is all that was found, as bench.json has it.
type Report struct {
	Machine Machine `json:"machine"`
	Rows    []Row   `json:"rows"`

	leftOut    []string
	unmeasured []string // rows with a target of their own
}

// add adds rows that are not there yet: an echo is measured by many experiments, and the first counts.
func (r *Report) add(rows []Row) {
	for _, row := range rows {
		if !slices.ContainsFunc(r.Rows, func(have Row) bool { return have.Name == row.Name }) {
			r.Rows = append(r.Rows, row)
		}
	}
}

func (r *Report) leaveOut(e experiment, why error) {
	var names []string
	for _, l := range e.lines {
		names = append(names, l.name)
		if !l.goal.none() && l.goal.rival == "" { // a rival need not be there
			r.unmeasured = append(r.unmeasured, l.name)
		}
	}
	reason, _, _ := strings.Cut(why.Error(), "\n")
	r.leftOut = append(r.leftOut, strings.Join(names, ", ")+": "+reason)
}

// cells are a row as a table has it, below header.
var header = []string{"row", "median", "p99", "n", "runs", "baseline", "ratio", "min … max", "target", "verdict"}

func (row Row) cells() []string {
	cells := []string{row.Name, quantity(row.Value, row.Unit), quantity(row.P99, row.Unit), strconv.Itoa(row.N), strconv.Itoa(len(row.Runs))}
	if c := row.Comparison; c != nil {
		cells = append(cells, c.Baseline, number(c.Ratio), number(c.RatioMin)+" … "+number(c.RatioMax))
	} else {
		cells = append(cells, "", "", "")
	}
	if v := row.Verdict; v != nil {
		return append(cells, row.line.goal.with(v.Target), v.String())
	}
	return append(cells, row.line.goal.String(), "")
}

// with is the goal with the figure that was put in for a rival.
func (g goal) with(target float64) string {
	if g.rival == "" {
		return g.String()
	}
	return fmt.Sprintf("%s (%s)", g, number(target))
}

// String is the verdict in a word or two.
func (v Verdict) String() string {
	text := "not met"
	if v.Met {
		text = "met"
	}
	if v.Uncertain {
		text += ", uncertain"
	}
	return text
}

// check names the rows that miss their target, and those that were left out and have one.
func (r *Report) check() error {
	var missed []string
	for _, row := range r.Rows {
		if row.Verdict != nil && !row.Met {
			missed = append(missed, fmt.Sprintf("%s is %s, and its target %s", row.Name, number(row.figure()), row.line.goal.with(row.Target)))
		}
	}
	for _, name := range r.unmeasured {
		missed = append(missed, name+" was not measured")
	}
	if len(missed) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", errMissed, strings.Join(missed, "; "))
}

// table writes the rows for a terminal.
func (r *Report) table(w io.Writer) {
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, strings.Join(header, "\t"))
	for _, row := range r.Rows {
		fmt.Fprintln(table, strings.Join(row.cells(), "\t"))
	}
	table.Flush()
	for _, text := range r.leftOut {
		fmt.Fprintln(w, "\nleft out:", text)
	}
}

// write writes the report as JSON to a path, and beside it as markdown and as charts. It returns the files.
func (r *Report) write(path string) (written []string, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, err
	}
	stem := strings.TrimSuffix(path, filepath.Ext(path))
	charts, err := r.charts(stem)
	if err != nil {
		return nil, err
	}
	err = errors.Join(os.WriteFile(path, append(text, '\n'), 0o644), os.WriteFile(stem+".md", []byte(r.markdown(charts)), 0o644))
	return append([]string{path, stem + ".md"}, charts...), err
}

// explanations are what the figures of some rows do not say.
var explanations = []struct{ row, text string }{
	{"vsock_echo_rtt_apart", "**In turn and apart.** The targets are for calls and echoes that are measured apart. An agent that has answered is not quiet at once, and in a " +
		"guest with one processor the echo after it waits for that, so that ratios of calls made in turn are smaller. Measured apart, each has the guest to itself."},
	{"fio_fsync", "**fsync.** Each fsync of ext4 is a commit of its journal, which makes QEMU flush the disk's file twice, once before the commit's block " +
		"and once after it. virtio-fs passes the fsync on to the host, whose filesystem commits its own journal once, for everyone who waits."},
	{"kata_memory_bytes", "**Memory.** In a guest whose root is an initramfs a program's file lies in memory, too, so that its size and its anonymous memory add up. " +
		"kata-agent's shared libraries are not counted."},
	{"boot_to_mount", "**Boot.** Both guests have the same kernel, command line, modules and disk; the init that mounts by hand has nothing else, and answers when the disk is " +
		"mounted. The agent answers as soon as vsock's modules are loaded, and mounting waits for the others. The time begins " +
		"with the first word of the kernel's boot code on the console, so that the firmware and QEMU's own start are not in it."},
}

// markdown is the report for people.
func (r *Report) markdown(charts []string) string {
	var b strings.Builder
	b.WriteString("# Figures\n\n`make bench` wrote this. A ratio is a row divided by its baseline, measured in the same runs and in turn: the median, the least and the " +
		"largest of the runs' ratios. Absolute times do not hold on another machine. A target is met where the median of the runs' ratios, or of the runs where " +
		"there is no baseline, reaches it; it is uncertain where it lies inside their spread, though the runs were doubled.\n\n")
	writeMarkdownRow(&b, header)
	b.WriteString(strings.Repeat("|---", len(header)) + "|\n")
	for _, row := range r.Rows {
		writeMarkdownRow(&b, row.cells())
	}
	b.WriteString("\n")
	for _, path := range charts {
		name := filepath.Base(path)
		fmt.Fprintf(&b, "![%s](%s)\n\n", strings.TrimSuffix(name, filepath.Ext(name)), name)
	}
	b.WriteString("## What the rows are\n\n")
	for _, row := range r.Rows {
		fmt.Fprintf(&b, "- `%s`: %s\n", row.Name, row.line.what)
	}
	for _, e := range explanations {
		if slices.ContainsFunc(r.Rows, func(row Row) bool { return row.Name == e.row }) {
			b.WriteString("\n" + e.text + "\n")
		}
	}
	for _, text := range r.leftOut {
		fmt.Fprintf(&b, "\nLeft out: %s\n", text)
	}
	b.WriteString("\n## The machine\n\n| | |\n|---|---|\n")
	for _, fact := range r.Machine.facts() {
		writeMarkdownRow(&b, fact[:])
	}
	return b.String()
}

func writeMarkdownRow(b *strings.Builder, cells []string) {
	for _, cell := range cells {
		b.WriteString("| " + strings.ReplaceAll(cell, "|", `\|`) + " ")
	}
	b.WriteString("|\n")
}

// brief is what a step leaves on the terminal: the rows that are compared, or else all of them.
func brief(rows []Row) string {
	var compared, all []string
	for _, row := range rows {
		text := row.Name + " " + quantity(row.Value, row.Unit)
		if row.Comparison != nil {
			text = row.Name + " × " + number(row.Ratio)
			compared = append(compared, text)
		}
		all = append(all, text)
	}
	if len(compared) > 0 {
		all = compared
	}
	return strings.Join(all, ", ")
}

// quantity is a figure with its unit, as short as it may be.
func quantity(v float64, unit string) string { return number(v) + " " + unit }

// number has three digits or more, and groups of three.
func number(v float64) string {
	decimals := 0
	for limit := 100.0; decimals < 2 && math.Abs(v) < limit; limit /= 10 {
		decimals++
	}
	if v == math.Trunc(v) {
		decimals = 0
	}
	whole, rest, dot := strings.Cut(strconv.FormatFloat(math.Abs(v), 'f', decimals, 64), ".")
	for at := len(whole) - 3; at > 0; at -= 3 {
		whole = whole[:at] + "," + whole[at:]
	}
	if dot {
		whole += "." + rest
	}
	if v < 0 {
		whole = "−" + whole
	}
	return whole
}
