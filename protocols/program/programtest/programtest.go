// Package programtest runs a program of this repository inside a test, as package program runs it
// in a process of its own.
package programtest

import (
	"bytes"
	"context"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/program"
)

// Result is the outcome of a run. Results can be compared with ==.
type Result struct {
	Exit           int // the exit status, see package program
	Stdout, Stderr string
}

// Run runs a program with arguments. ctx ends as a signal ends the context of program.Main. A
// command keeps the values of its flags, so root must be a new command for each run.
func Run(ctx context.Context, root *cobra.Command, args ...string) Result {
	var stdout, stderr bytes.Buffer
	exit := program.Run(ctx, root, args, &stdout, &stderr)
	return Result{exit, stdout.String(), stderr.String()}
}
