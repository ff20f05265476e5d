// Command bench measures what directvol's users wait for, and pay, each figure beside the floor that it is held against: in one VM where both
// need one, in turn, with one server running at a time. It shows a table and writes it as JSON, as markdown and as charts.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

const help = `bench measures directvol beside the floors that it is held against, and says what it found on the terminal, in
build/bench.json, in build/bench.md and in charts (build/bench-*.svg). make bench builds what it needs and runs it.

Examples:
  build/bench                            every row: some 15 minutes without KVM
  build/bench --rows '^(health|volume)'  two rows and their baseline: less than a minute
  build/bench --rows fio --runs 9        more runs than 5, for a narrower answer
  build/bench --check                    exit 3 where a target is missed: make bench CHECK=1
  KATA_AGENT=./kata-agent build/bench --rows 'rtt|rss|memory'

A ratio is a row divided by its baseline, measured in the same runs and in turn. Absolute times do not hold on another machine, and on a
busy one not even ratios do: run it on a quiet one. Where the target lies inside the spread of the runs, the rows are measured again,
with twice the runs.

The rows of kata_agent need KATA_AGENT, a path of a kata-agent built for Debian 12.

Options:
`

// options are what the command line says.
type options struct {
	rows    *regexp.Regexp
	runs    int
	json    string
	check   bool
	verbose bool
}

// fewestRuns is what a spread needs to be one.
const fewestRuns = 5

func main() {
	o, err := parse(os.Args[1:], os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v; see --help\n", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		switch {
		case ctx.Err() != nil:
			os.Exit(130) // as a shell reports a program that Ctrl-C ended
		case errors.Is(err, errMissed):
			os.Exit(3)
		}
		os.Exit(1)
	}
}

// errMissed ends a bench in which all was measured, and not all targets were met.
var errMissed = errors.New("target missed")

// parse reads the command line. Where it asks for help, that is written, and the error is flag.ErrHelp.
func parse(args []string, w io.Writer) (options, error) {
	o := options{rows: regexp.MustCompile("")}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.Func("rows", "measure only the rows whose name matches `REGEX`, and their baselines", func(value string) (err error) {
		o.rows, err = regexp.Compile(value)
		return err
	})
	flags.IntVar(&o.runs, "runs", fewestRuns, "measure each row in `N` runs, 5 or more")
	flags.StringVar(&o.json, "json", "build/bench.json", "write the figures, for programs, to `PATH`; the rest goes beside it")
	flags.BoolVar(&o.check, "check", false, "exit 3 where a row misses its target, or has one and could not be measured")
	flags.BoolVar(&o.verbose, "v", false, "show what the host's side logs")
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(w, help)
		flags.SetOutput(w)
		flags.PrintDefaults()
		fmt.Fprintln(w, "\nRows, with their targets:")
		describe(w)
		return o, err
	case err != nil:
		return o, err
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.runs < fewestRuns:
		return o, fmt.Errorf("%d runs say little of their spread: want %d or more", o.runs, fewestRuns)
	case len(chosen(o.rows)) == 0:
		return o, fmt.Errorf("no row matches %q", o.rows)
	}
	return o, nil
}

// describe lists the rows.
func describe(w io.Writer) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	told := map[string]bool{} // an echo is measured by many
	for _, e := range experiments {
		for _, l := range e.lines {
			if !told[l.name] {
				fmt.Fprintf(table, "  %s\t%s\t%s\n", l.name, l.goal, l.what)
			}
			told[l.name] = true
		}
	}
	table.Flush()
}

// run measures, and tells.
func run(ctx context.Context, o options, w *os.File) error {
	l, err := newLab(ctx, o, w)
	if err != nil {
		return err
	}
	defer l.close()
	report, err := l.measureAll(ctx, chosen(o.rows), o.runs)
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted: the VM is gone, and nothing was written: %w", ctx.Err())
	}
	if len(report.Rows) > 0 {
		report.table(w)
		written, writeErr := report.write(o.json)
		err = errors.Join(err, writeErr)
		fmt.Fprintln(w)
		for _, path := range written {
			fmt.Fprintln(w, "written:", path)
		}
	}
	if err == nil && o.check {
		err = report.check()
	}
	return err
}
