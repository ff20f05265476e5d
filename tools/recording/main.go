// Command recording converts a program's terminal session, recorded by script(1), into an asciicast
// and into an animated SVG. `make recording` converts the demo's.
//
// The typescript is the program's output. The timing file, in script's classic format, has one line
// per piece of output: the seconds since the previous piece, and the number of bytes. The asciicast
// has version 2 of https://docs.asciinema.org/manual/asciicast/v2/.
package main

import (
	"bytes"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/protocols/program"
)

func main() { program.Main(newCommand()) }

// frames is the maximum number of pictures per second in the SVG.
const frames = 10

// settings are the values of the flags.
type settings struct {
	typescript, timing string
	cast, svg          string
	title              string
	columns, rows      int
	speed              float64
}

func newCommand() *cobra.Command {
	var set settings
	cmd := &cobra.Command{
		Use:   "recording",
		Short: "Make an asciicast and an animated SVG from a recording of script(1)",
		Example: `  script --quiet --command build/demo --log-out demo.out --log-timing demo.timing
  recording --typescript demo.out --timing demo.timing --cast demo.cast --svg demo.svg`,
		Args: program.NoArgs,
		RunE: func(*cobra.Command, []string) error { return run(set) },
	}
	flags := cmd.Flags()
	flags.StringVar(&set.typescript, "typescript", "", "`FILE` with the output, of script --log-out")
	flags.StringVar(&set.timing, "timing", "", "`FILE` with its times, of script --log-timing")
	flags.StringVar(&set.cast, "cast", "", "`FILE` for the asciicast")
	flags.StringVar(&set.svg, "svg", "", "`FILE` for the SVG")
	flags.StringVar(&set.title, "title", "", "`TEXT` above the terminal, and the asciicast's title")
	flags.IntVar(&set.columns, "columns", 120, "the terminal's columns")
	flags.IntVar(&set.rows, "rows", 28, "the rows that the SVG shows at a time")
	flags.Float64Var(&set.speed, "speed", 4, "the speed of the SVG, as a multiple of the recording's")
	for _, name := range []string{"typescript", "timing", "cast", "svg"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err)
		}
	}
	return cmd
}

func run(set settings) error {
	if set.columns < 1 || set.rows < 1 || set.speed <= 0 {
		return program.Usagef("--columns, --rows and --speed have to be positive")
	}
	typescript, err := os.ReadFile(set.typescript)
	if err != nil {
		return err
	}
	times, err := os.ReadFile(set.timing)
	if err != nil {
		return err
	}
	pieces, err := cut(typescript, string(times))
	if err != nil {
		return fmt.Errorf("%s and %s: %w", set.typescript, set.timing, err)
	}
	var cast, svg bytes.Buffer
	if err := writeCast(&cast, set, pieces); err != nil {
		return err
	}
	lines, err := play(pieces, set.columns, set.speed/frames)
	if err != nil {
		return fmt.Errorf("%s: %w", set.typescript, err)
	}
	if err := writeSVG(&svg, set, lines, end(pieces)); err != nil {
		return err
	}
	if err := output.WriteFile(set.cast, cast.Bytes()); err != nil {
		return err
	}
	return output.WriteFile(set.svg, svg.Bytes())
}
