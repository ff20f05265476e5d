// Command demo boots a VM and runs the main job of directvol in it, once with ext4 and once with
// xfs: a disk is attached to the running VM, mounted by the agent, written to, grown while it is
// written to, read back, broken, reported as abnormal, repaired and checked. The demo prints each
// step on the terminal and writes its results as JSON.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/directvol/directvol/protocols/program"
	"github.com/directvol/directvol/tests/vm"
)

func main() { program.Main(newCommand()) }

func newCommand() *cobra.Command {
	var out string
	var verbose bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Boot a VM and take volumes through their life in it",
		Long: `demo boots a VM and takes volumes through their life in it: attach, mount, write, grow, break, repair, check.
make demo builds the programs that it needs and runs it.`,
		Example: `  make demo
  build/demo --json /tmp/facts.json`,
		Args: program.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), cmd.OutOrStdout(), out, verbose)
		},
	}
	cmd.Flags().StringVar(&out, "json", "build/demo.json", "`FILE` for the facts, for programs")
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "show the log of the host's side")
	return cmd
}

// audience is the standard output. The demo ends when the reader of its standard output goes away;
// any other broken pipe, for example of a socket, is a failure.
type audience struct {
	io.Writer
	gone context.CancelCauseFunc
}

func (a audience) Write(p []byte) (int, error) {
	n, err := a.Writer.Write(p)
	if err != nil {
		a.gone(err)
	}
	return n, err
}

// Fd lets package output recognize a terminal.
func (a audience) Fd() uintptr {
	if file, ok := a.Writer.(*os.File); ok {
		return file.Fd()
	}
	return ^uintptr(0)
}

// errInterrupted is the demo's error when a signal has ended it.
var errInterrupted = errors.New("interrupted: the VM has ended and its disks are removed")

func run(ctx context.Context, stdout io.Writer, out string, verbose bool) error {
	watched, gone := context.WithCancelCause(ctx)
	defer gone(nil)
	to := audience{stdout, gone}
	s := newTranscript(to)
	began := time.Now()
	report := &Report{Error: "it did not finish", Steps: []Step{}, Volumes: []*VolumeReport{}}
	if err := report.write(out); err != nil { // so that nobody takes an earlier run's report for this run's
		return fmt.Errorf("write the facts: %w; start demo at the top of the checkout, as make demo does, or name another --json FILE", err)
	}
	err := job(watched, s, report, verbose)
	switch {
	case ctx.Err() != nil:
		err = errInterrupted
	case watched.Err() != nil:
		err = context.Cause(watched)
	}
	report.Seconds = time.Since(began).Seconds()
	report.Steps = s.steps
	report.OK, report.Error = err == nil, ""
	if err != nil {
		report.Error = err.Error()
	}
	if writeErr := report.write(out); writeErr != nil {
		err = errors.Join(err, writeErr)
	}
	if err == nil {
		report.summary(to)
		fmt.Fprintf(to, "\nThe same for programs: %s\n", out)
	}
	return err
}

// job runs the whole demo, from the start of the VM to its end.
func job(ctx context.Context, s *transcript, report *Report, verbose bool) (err error) {
	if err := vm.HasRoom(os.TempDir(), roomBytes()); err != nil { // checked before the VM boots
		return err
	}
	options := vm.Options{}
	if verbose {
		options.Log = os.Stderr
	}
	var guest *vm.Guest
	err = s.step(ctx, "Boot a VM whose PID 1 is directvol-agent", func(ctx context.Context, say func(string)) (err error) {
		if guest, err = vm.Boot(ctx, options); err != nil {
			return err
		}
		report.Versions, err = versions(ctx, guest)
		say(fmt.Sprintf("Linux %s, QEMU %s, agent %s", report.Versions.Kernel, report.Versions.QEMU, report.Versions.Agent))
		return err
	})
	if guest == nil {
		return err
	}
	defer guest.Close()
	defer func() {
		if err != nil && ctx.Err() == nil {
			guest.Explain(os.Stderr)
		}
		guest.Kill()
	}()
	if err != nil {
		return err
	}
	accelerator := guest.VM().Accelerator()
	s.Note("accelerator %s (%s)", accelerator.Name, accelerator.Reason)

	s.watch = startWatch(ctx, guest)
	volumes, err := grow(ctx, s, report, guest)
	if err != nil {
		return err
	}
	if err := breakAndHeal(ctx, s, volumes); err != nil {
		return err
	}
	return s.step(ctx, "Destroy the sandbox; the guest powers off", func(ctx context.Context, say func(string)) error {
		if err := guest.Stop(ctx); err != nil {
			return err
		}
		say("QMP says SHUTDOWN by the guest, QEMU exits 0")
		return nil
	})
}

func versions(ctx context.Context, guest *vm.Guest) (Versions, error) {
	agent, err := guest.Agent().Version(ctx)
	if err != nil {
		return Versions{}, err
	}
	kernel, err := guest.Remote.ReadFile(ctx, "/proc/sys/kernel/osrelease")
	if err != nil {
		return Versions{}, err
	}
	return Versions{Kernel: trim(kernel), QEMU: guest.VM().Version(), Agent: agent.AgentVersion}, nil
}
