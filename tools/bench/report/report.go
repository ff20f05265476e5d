// Package report writes the results of the bench: a table for the terminal, JSON for programs, and
// a page with charts. Package measure does the measuring.
package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/tools/bench/measure"
)

// Report holds all results, as in bench.json.
type Report struct {
	Machine Machine       `json:"machine"`
	Rows    []measure.Row `json:"rows"`
	// Sections are the experiments in the order in which they ran.
	Sections []measure.Section `json:"sections"`

	leftOut    []string
	unmeasured []string // rows with their own target that were not measured
}

// New returns the report of measurements on a machine.
func New(machine Machine, result *measure.Result) *Report {
	r := &Report{Machine: machine, Rows: result.Rows, Sections: result.Sections}
	for _, o := range result.LeftOut {
		r.leaveOut(o)
	}
	return r
}

func (r *Report) leaveOut(o measure.Omission) {
	var names []string
	for _, l := range o.Lines {
		names = append(names, l.Name)
		if !l.Goal.None() && l.Goal.Rival() == "" { // a rival may be missing
			r.unmeasured = append(r.unmeasured, l.Name)
		}
	}
	reason, _, _ := strings.Cut(o.Why.Error(), "\n")
	r.leftOut = append(r.leftOut, strings.Join(names, ", ")+": "+reason)
}

// cells returns the cells of a row in a table below header.
var header = []string{"row", "median", "p99", "n", "runs", "baseline", "ratio", "min … max", "target", "verdict"}

func cellsOf(row measure.Row) []string {
	cells := []string{row.Name, measure.Quantity(row.Value, row.Unit), measure.Quantity(row.P99, row.Unit), strconv.Itoa(row.N), strconv.Itoa(len(row.Runs))}
	if c := row.Comparison; c != nil {
		cells = append(cells, c.Baseline, measure.Number(c.Ratio), measure.Number(c.RatioMin)+" … "+measure.Number(c.RatioMax))
	} else {
		cells = append(cells, "", "", "")
	}
	if v := row.Verdict; v != nil {
		return append(cells, row.Line.Goal.With(v.Target), v.String())
	}
	return append(cells, row.Line.Goal.String(), "")
}

// ErrMissed is wrapped by the errors of Check.
var ErrMissed = errors.New("target missed")

// Check returns an ErrMissed that names the rows that missed their target, and the rows with a
// target that were not measured.
func (r *Report) Check() error {
	var missed []string
	for _, row := range r.Rows {
		if row.Verdict != nil && !row.Met {
			missed = append(missed, fmt.Sprintf("%s is %s, and its target %s", row.Name, measure.Number(row.Figure()), row.Line.Goal.With(row.Target)))
		}
	}
	for _, name := range r.unmeasured {
		missed = append(missed, name+" was not measured")
	}
	if len(missed) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrMissed, strings.Join(missed, "; "))
}

// Table writes the rows as a table for a terminal.
func (r *Report) Table(w io.Writer) error {
	table := output.Table(w)
	fmt.Fprintln(table)
	fmt.Fprintln(table, strings.Join(header, "\t"))
	for _, row := range r.Rows {
		fmt.Fprintln(table, strings.Join(cellsOf(row), "\t"))
	}
	for _, text := range r.leftOut {
		fmt.Fprintln(table, "\nleft out:", text)
	}
	return table.Flush()
}

// CanWrite checks, before anything is measured, that Write could make a file in path's folder. It
// makes the folder.
func CanWrite(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return &os.PathError{Op: "write", Path: path, Err: unix.EISDIR}
	}
	if err := unix.Access(filepath.Dir(path), unix.W_OK); err != nil {
		return &os.PathError{Op: "write to", Path: filepath.Dir(path), Err: err}
	}
	return nil
}

// Write writes the report as JSON to path, and next to it as markdown and as charts. A file that
// cannot be written keeps no other from being written. It returns the names of the written files.
func (r *Report) Write(path string) (written []string, err error) {
	if err := CanWrite(path); err != nil {
		return nil, err
	}
	write := func(file string, data []byte) {
		if failed := output.WriteFile(file, data); failed != nil {
			err = errors.Join(err, failed)
			return
		}
		written = append(written, file)
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, err
	}
	write(path, append(text, '\n'))
	stem := strings.TrimSuffix(path, filepath.Ext(path))
	charts, failed := r.charts(stem)
	err = errors.Join(err, failed)
	write(stem+".md", []byte(r.markdown(charts)))
	return append(written, charts...), err
}

// explanations explain figures that would be misunderstood without them.
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

// markdown returns the report as a page for people.
func (r *Report) markdown(charts []string) string {
	var b strings.Builder
	b.WriteString("# Figures\n\n`make bench` wrote this. A ratio is a row divided by its baseline, measured in the same runs and in turn: the median, the least and the " +
		"largest of the runs' ratios. Absolute times do not hold on another machine. A target is met where the median of the runs' ratios, or of the runs where " +
		"there is no baseline, reaches it; it is uncertain where it lies inside their spread, though there are twice the runs of the other rows then.\n\n")
	writeMarkdownRow(&b, header)
	b.WriteString(strings.Repeat("|---", len(header)) + "|\n")
	for _, row := range r.Rows {
		writeMarkdownRow(&b, cellsOf(row))
	}
	b.WriteString("\n")
	for _, path := range charts {
		name := filepath.Base(path)
		fmt.Fprintf(&b, "![%s](%s)\n\n", strings.TrimSuffix(name, filepath.Ext(name)), name)
	}
	b.WriteString("## What the rows are\n\n")
	for _, row := range r.Rows {
		fmt.Fprintf(&b, "- `%s`: %s\n", row.Name, row.Line.What)
	}
	for _, e := range explanations {
		if slices.ContainsFunc(r.Rows, func(row measure.Row) bool { return row.Name == e.row }) {
			b.WriteString("\n" + e.text + "\n")
		}
	}
	for _, text := range r.leftOut {
		fmt.Fprintf(&b, "\nLeft out: %s\n", text)
	}
	b.WriteString("\n## How long it took\n\n")
	writeMarkdownRow(&b, []string{"section", "runs", "time"})
	b.WriteString("|---|---|---|\n")
	for _, s := range append(r.Sections, r.total()) {
		writeMarkdownRow(&b, []string{s.Name, strconv.Itoa(s.Runs), fmt.Sprintf("%.1f s", s.Seconds)})
	}
	b.WriteString("\n## The machine\n\n| | |\n|---|---|\n")
	for _, fact := range r.Machine.facts() {
		writeMarkdownRow(&b, fact[:])
	}
	return b.String()
}

// total returns the sum of the sections.
func (r *Report) total() measure.Section {
	all := measure.Section{Name: "all"}
	for _, s := range r.Sections {
		all.Seconds, all.Runs = all.Seconds+s.Seconds, all.Runs+s.Runs
	}
	return all
}

func writeMarkdownRow(b *strings.Builder, cells []string) {
	for _, cell := range cells {
		b.WriteString("| " + strings.ReplaceAll(cell, "|", `\|`) + " ")
	}
	b.WriteString("|\n")
}
