// Command agent-ctl calls an agent in a guest by hand: directvol's own or Kata Containers', which speak the same ttrpc
// (github.com/containerd/ttrpc, PROTOCOL.md; protocols/proto). Its grammar is that of Kata's kata-agent-ctl.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// How a run ends, as its exit status.
const (
	exitOK          = 0
	exitFailed      = 1   // a call failed, or the agent could not be reached
	exitUsage       = 2   // nothing was tried: the command line is wrong
	exitInterrupted = 130 // as a shell reports a program that Ctrl-C ended
)

// errCallFailed is that of a call whose error was told in its place among the answers.
var errCallFailed = errors.New("a call failed")

// failure is an error of what was tried. Any other is one of usage.
type failure struct{ error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	command, err := root.ExecuteContextC(ctx)
	_, tried := errors.AsType[failure](err)
	switch {
	case err == nil:
		return exitOK
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "agent-ctl: interrupted")
		return exitInterrupted
	case errors.Is(err, errCallFailed):
		return exitFailed
	case tried:
		fmt.Fprintln(stderr, "agent-ctl:", err)
		return exitFailed
	default:
		fmt.Fprintf(stderr, "agent-ctl: %v\nsee %s --help\n", err, command.CommandPath())
		return exitUsage
	}
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "agent-ctl",
		Short: "Call the agent in a guest by hand",
		Long: `agent-ctl calls the agent in a guest by hand, directvol's or Kata Containers': every
method of grpc.AgentService and grpc.Health, with a request in JSON.

It is a tool for looking and for tests. An agent does what it is told, and a guest in
which containers run will not forgive a DestroySandbox.`,
		Example: `  agent-ctl connect --server-address vsock://3:1024 -c Check -c Version
  agent-ctl list GetVolumeStats       # its fields and their types
  agent-ctl examples ResizeVolume     # a call to copy`,
		SilenceErrors: true, // run prints them, with the exit status that they mean
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddCommand(newConnectCommand(), newListCommand(), newExamplesCommand())
	return root
}
