package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/guest/act"
	"github.com/directvol/directvol/tests/vm"
)

// lab is where experiments are made: a folder for what they need, and the one guest that most of them share.
type lab struct {
	build    vm.Build
	dir      string // removed at the end
	memory   string // the same, in the host's memory where it can be
	log      io.Writer
	progress *progress
	machine  Machine

	whole context.Context // the whole bench's

	guest *vm.Guest // nil until somebody wants it
	kata  string    // where its kata-agent answers, "" until somebody wants one
	atEnd []func()  // what ends processes, also when the bench is interrupted
}

func newLab(ctx context.Context, o options, terminal *os.File) (*lab, error) {
	build, err := vm.FindBuild()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "directvol-bench-")
	if err != nil {
		return nil, err
	}
	memory, err := memoryFolder(dir)
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	l := &lab{build: build, dir: dir, memory: memory, log: io.Discard, progress: newProgress(terminal), machine: hostFacts(), whole: ctx}
	if o.verbose {
		l.log = os.Stderr
	}
	logrus.SetOutput(l.log) // ttrpc logs a line there for each answer that comes too late
	return l, nil
}

// close leaves nothing behind.
func (l *lab) close() {
	l.endGuest()
	for _, end := range l.atEnd {
		end()
	}
	os.RemoveAll(l.memory)
	os.RemoveAll(l.dir)
}

// patient has the agent wait longer for a disk than it does for a host that goes on without it: a machine that is busy ends no bench.
const patient = "agent.hotplug_timeout=30"

// theGuest is the guest that experiments share. It is booted for the first of them.
func (l *lab) theGuest(ctx context.Context) (*vm.Guest, error) {
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
	return guest, l.machine.addGuest(ctx, guest)
}

// startEcho starts the echo that round trips are measured against, and returns when it answers.
func (l *lab) startEcho(ctx context.Context, guest *vm.Guest) error {
	ended := make(chan error, 1)
	go func() {
		exit, err := guest.Act.Exec(l.whole, act.Command{Argv: []string{"/test-guest", act.BareEcho}, Env: []string{"GODEBUG=asyncpreemptoff=1"}})
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

// endGuest ends it, as pulling the plug does: what it holds is scratch.
func (l *lab) endGuest() {
	if l.guest == nil {
		return
	}
	l.guest.Kill()
	l.guest.Close()
	l.guest, l.kata = nil, ""
}

// explain says on the terminal what a failure leaves to look at.
func (l *lab) explain(err error) {
	l.progress.note("failed: %v", err)
	if l.guest != nil {
		l.guest.Explain(os.Stderr)
	}
}

// agentAddress is where the guest's own agent is reached.
func agentAddress(guest *vm.Guest) (address.Address, error) {
	return address.Parse(guest.VM().AgentAddress())
}
