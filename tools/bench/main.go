// Command bench measures the times that directvol's users wait for and the resources that they pay,
// each figure together with its floor. Three packages do the work: measure has the rules that turn
// runs into a row and a verdict, experiments has the rows and the code that measures them, and
// report writes the results. The bench is its own module, so that nothing else depends on its
// plotting library.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/tools/bench/experiments"
	"github.com/directvol/directvol/tools/bench/report"
)

func main() { program.Main(newCommand()) }

const long = `bench measures directvol beside its baselines and reports the results on the terminal, in build/bench.json, in
build/bench.md and in charts (build/bench-*.svg). make bench builds the programs that it needs and runs it.

A ratio is a row divided by its baseline, measured in the same runs and in turn. Absolute times do not hold on another
machine, and on a busy one not even ratios do: run it on a quiet one. Where a target lies inside the spread of the runs,
as many runs are made again, and the row is of all of them. build/bench.md says how long each section took.

The rows of kata_agent need KATA_AGENT, the path of a kata-agent built for Debian 12.

Exit status: 0, 1 where a row could not be measured, 2 for a wrong command line, 3 where --check finds a target missed,
130 for Ctrl-C.`

const example = `  build/bench                                every row: some 40 minutes without KVM
  build/bench --row health_check_rtt_apart   one row and its baseline: less than a minute
  build/bench --rows '^(health|volume)'      the rows whose names match
  build/bench --rows fio --runs 9            more runs than 5, for a narrower answer
  build/bench --check                        exit 3 where a target is missed: make bench CHECK=1
  KATA_AGENT=./kata-agent build/bench --rows 'rtt|rss|memory'`

// options are the values of the command line.
type options struct {
	wanted func(row string) bool
	runs   int
	json   string
	check  bool
	log    io.Writer
}

const (
	// fewestRuns is the minimum number of runs for a spread.
	fewestRuns = 5
	// missed is the exit status if a target is missed.
	missed = 3
)

func newCommand() *cobra.Command {
	var o options
	var names []string
	var pattern string
	var verbose bool
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure directvol beside its baselines", Long: long + "\n\nRows, with their targets:\n" + rows(), Example: example, Args: program.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.wanted, err = selection(names, pattern); err != nil {
				return program.Usage(err)
			}
			if o.runs < fewestRuns {
				return program.Usagef("%d runs show too little of their spread: want %d or more", o.runs, fewestRuns)
			}
			if o.log = io.Discard; verbose {
				o.log = cmd.ErrOrStderr()
			}
			return run(cmd.Context(), o, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringSliceVar(&names, "row", nil, "measure only the rows `NAME,...`, and their baselines (repeatable)")
	cmd.Flags().StringVar(&pattern, "rows", "", "measure only the rows whose names match `REGEX`, and their baselines")
	cmd.Flags().IntVar(&o.runs, "runs", fewestRuns, "measure each row in `N` runs, 5 or more")
	cmd.Flags().StringVar(&o.json, "json", "build/bench.json", "`FILE` for the figures, for programs; the rest goes beside it")
	cmd.Flags().BoolVar(&o.check, "check", false, "exit 3 if a row misses its target or a row with a target could not be measured")
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "show the log of the host's side")
	return cmd
}

// selection selects the rows that --row names or --rows matches, or all rows if neither is given.
func selection(names []string, pattern string) (func(row string) bool, error) {
	match, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("--rows: %w", err)
	}
	var all []string
	for _, l := range experiments.Lines() {
		all = append(all, l.Name)
	}
	for _, name := range names {
		if !slices.Contains(all, name) {
			return nil, fmt.Errorf("--row: no row is named %q", name)
		}
	}
	wanted := func(row string) bool {
		return slices.Contains(names, row) || (pattern != "" || len(names) == 0) && match.MatchString(row)
	}
	if !slices.ContainsFunc(all, wanted) {
		return nil, fmt.Errorf("--rows: no row matches %q", pattern)
	}
	return wanted, nil
}

// rows lists all rows, one per line.
func rows() string {
	var b bytes.Buffer
	table := output.Table(&b)
	for _, l := range experiments.Lines() {
		fmt.Fprintf(table, "  %s\t%s\t%s\n", l.Name, l.Goal, l.What)
	}
	table.Flush() // writing to a buffer cannot fail
	return b.String()
}

// run measures, and reports the results.
func run(ctx context.Context, o options, stdout io.Writer) error {
	if err := report.CanWrite(o.json); err != nil {
		return fmt.Errorf("write the figures: %w; name another --json FILE", err)
	}
	setup, err := experiments.NewSetup(ctx, o.log)
	if err != nil {
		return err
	}
	defer setup.Close()
	result, err := setup.Bench(output.NewProgress(stdout)).Measure(ctx, setup.Experiments(o.wanted), o.runs)
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted: the VM is gone, and nothing was written: %w", ctx.Err())
	}
	found := report.New(setup.Machine(), result)
	if len(result.Rows) > 0 {
		err = errors.Join(err, tell(found, o.json, stdout))
	}
	if err == nil && o.check {
		err = checked(found)
	}
	return err
}

// checked returns an error with the exit status missed if the report has a missed target.
func checked(found *report.Report) error { return program.WithStatus(missed, found.Check()) }

// tell writes the report to files and to the terminal.
func tell(found *report.Report, path string, stdout io.Writer) error {
	if err := found.Table(stdout); err != nil {
		return err
	}
	written, err := found.Write(path)
	fmt.Fprintln(stdout)
	for _, path := range written {
		fmt.Fprintln(stdout, "written:", path)
	}
	return err
}
