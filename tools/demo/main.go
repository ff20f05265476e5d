// Command demo boots a VM and runs the main job in it, once with ext4 and once
// with xfs: a disk is attached to the running VM, mounted by the agent, written
// to, grown under its writer, read back, broken, found sick, healed and checked.
// It tells the story on the terminal and writes it down as JSON.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/vm"
)

func main() {
	out := flag.String("json", "build/demo.json", "where to write the facts, for programs")
	verbose := flag.Bool("v", false, "show what the host's side logs")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "demo boots a VM and runs the main job in it: attach, mount, write, grow, break, heal, check.\nmake demo builds what it needs and runs it.\n\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: unexpected argument %q; see -help\n", flag.Arg(0))
		os.Exit(2)
	}
	// A closed terminal and a closed pipe end the story too, and not the program
	// before it has cleaned up.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM, unix.SIGHUP, unix.SIGPIPE)
	defer stop()
	context.AfterFunc(ctx, func() { signal.Reset(os.Interrupt) }) // a second Ctrl-C ends it at once
	err := run(ctx, *out, *verbose)
	switch {
	case errors.Is(err, errInterrupted):
		fmt.Fprintln(os.Stderr, "demo: interrupted; the VM has ended and its disks are removed")
		os.Exit(130) // as a shell reports a program that Ctrl-C ended
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// errInterrupted is the demo's error when it was told to end.
var errInterrupted = errors.New("interrupted")

func run(ctx context.Context, out string, verbose bool) error {
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	s := newStory(os.Stdout)
	began := time.Now()
	report := &Report{Error: "it did not finish", Steps: []Step{}, Volumes: []*VolumeReport{}}
	if err := report.write(out); err != nil { // nobody shall take an earlier run's for this one's
		return err
	}
	err := job(ctx, s, report, verbose)
	if ctx.Err() != nil {
		err = errInterrupted
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
		report.summary(os.Stdout)
		fmt.Printf("\nThe same for programs: %s\n", out)
	}
	return err
}

// job is the whole of it, from the VM's start to its end.
func job(ctx context.Context, s *story, report *Report, verbose bool) (err error) {
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
	s.note("accelerator %s (%s)", accelerator.Name, accelerator.Reason)

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
	kernel, err := guest.Act.ReadFile(ctx, "/proc/sys/kernel/osrelease")
	if err != nil {
		return Versions{}, err
	}
	return Versions{Kernel: trim(kernel), QEMU: guest.VM().Version(), Agent: agent.AgentVersion}, nil
}
