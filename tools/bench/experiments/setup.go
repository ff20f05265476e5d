package experiments

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/tests/guest/remote"
	"github.com/directvol/directvol/tests/vm"
	"github.com/directvol/directvol/tools/bench/measure"
	"github.com/directvol/directvol/tools/bench/report"
)

// Setup is the environment of the experiments: a folder for their files, and the one guest that
// most of them share.
type Setup struct {
	build    vm.Build
	dir      string // removed by Close
	memory   string // another folder, in the host's memory if possible
	inMemory bool   // it is
	log      io.Writer
	machine  report.Machine

	whole context.Context // the context of the whole bench

	guest *vm.Guest // nil until an experiment needs it
	kata  string    // where its kata-agent answers, "" until somebody wants one
	fio   *fioBed   // in the guest; nil until an experiment needs it
	atEnd []func()  // end processes, also when the bench is interrupted
}

// NewSetup makes a setup, which the caller closes. log receives the log of the host's side. Guests
// of the setup end with ctx.
func NewSetup(ctx context.Context, log io.Writer) (*Setup, error) {
	build, err := vm.FindBuild()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "directvol-bench-")
	if err != nil {
		return nil, err
	}
	memory, inMemory, err := memoryFolder(dir)
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	logrus.SetOutput(log) // ttrpc logs a line to it for each late answer
	return &Setup{build: build, dir: dir, memory: memory, inMemory: inMemory, log: log, machine: report.Host(), whole: ctx}, nil
}

// Close ends the guest and removes all files.
func (l *Setup) Close() {
	l.endGuest()
	for _, end := range l.atEnd {
		end()
	}
	os.RemoveAll(l.memory)
	os.RemoveAll(l.dir)
}

// Machine returns the facts about host and guest that the experiments have collected so far.
func (l *Setup) Machine() report.Machine { return l.machine }

// Limits for hanging work, as bases for vm.Limit.
const (
	setUpLimit = 30 * time.Second
	runLimit   = 30 * time.Second
)

// Bench returns the bench of the setup, which shows its steps on progress. After a failure it
// prints an explanation to the standard error, and the next experiment gets a new guest.
func (l *Setup) Bench(progress *output.Progress) *measure.Bench {
	return &measure.Bench{Progress: progress, SetUpLimit: vm.Limit(setUpLimit), RunLimit: vm.Limit(runLimit), Failed: func(error) {
		if l.guest != nil {
			l.guest.Explain(os.Stderr)
		}
		l.endGuest()
	}}
}

// patient is a kernel option that makes the agent wait longer for a disk than by default, so that a
// busy machine does not fail the bench.
const patient = "agent.hotplug_timeout=30"

// theGuest returns the guest that experiments share. The first experiment that needs it boots it.
func (l *Setup) theGuest(ctx context.Context) (*vm.Guest, error) {
	if l.guest != nil {
		return l.guest, nil
	}
	guest, err := vm.Boot(ctx, vm.Options{Log: l.log, Append: patient})
	if err != nil {
		return nil, err
	}
	l.guest = guest
	if err := l.startEcho(ctx, guest); err != nil {
		return nil, err
	}
	return guest, addGuest(ctx, &l.machine, guest)
}

// startEcho starts the echo server, the baseline of round trips, and returns when it answers.
func (l *Setup) startEcho(ctx context.Context, guest *vm.Guest) error {
	ended := make(chan error, 1)
	go func() {
		exit, err := guest.Remote.Exec(l.whole, remote.Command{Argv: []string{"/test-guest", remote.BareEcho}, Env: []string{"GODEBUG=asyncpreemptoff=1"}})
		if err == nil {
			err = fmt.Errorf("exit %d: %s", exit.Code, exit.Stderr)
		}
		ended <- err
	}()
	again := time.NewTicker(dialInterval)
	defer again.Stop()
	for {
		e, err := dialEcho(ctx, guest)
		if err == nil {
			return errors.Join(e.once(), e.Close())
		}
		select {
		case err := <-ended:
			return fmt.Errorf("the guest's echo: %w", err)
		case <-ctx.Done():
			return fmt.Errorf("the guest's echo: %w (%w)", ctx.Err(), err)
		case <-again.C:
		}
	}
}

// endGuest kills the guest, like pulling its plug: its data is scratch.
func (l *Setup) endGuest() {
	if l.guest == nil {
		return
	}
	l.guest.Kill()
	l.guest.Close()
	l.guest, l.kata, l.fio = nil, "", nil
}

// agentAddress returns the address of the guest's own agent.
func agentAddress(guest *vm.Guest) (address.Address, error) {
	return address.Parse(guest.VM().AgentAddress())
}
