// Command directvol is the host side of direct-assigned volumes for containers
// that run in virtual machines. Each subcommand has a file of its own.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

func main() {
	// A reader that goes away, such as a tee at Ctrl-C, must not end a program that
	// has something to undo.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	var ends []os.Signal
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP} {
		if !signal.Ignored(s) { // as nohup has it
			ends = append(ends, s)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	err := newRootCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "directvol: %v\n", err)
		os.Exit(exitStatus(err))
	}
}

// usageError is that of a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// usage makes the errors of a check of arguments usage errors.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{fmt.Errorf("%w: see %s --help", err, cmd.CommandPath())}
		}
		return nil
	}
}

// exitStatus is 2 for a wrong command line and 1 for all else that fails.
func exitStatus(err error) int {
	if _, ok := errors.AsType[usageError](err); ok {
		return 2
	}
	return 1
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "directvol",
		Short: "Block volumes for containers that run in virtual machines",
		Long: `directvol attaches block volumes to running virtual machines, where the agent in
the guest mounts, measures, grows and watches them.`,
		SilenceErrors: true, // main prints the error, on one line
		SilenceUsage:  true,
		Args:          usage(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w: see %s --help", err, cmd.CommandPath())}
	})
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newRescueCommand(), newVhostVsockCommand())
	return root
}
