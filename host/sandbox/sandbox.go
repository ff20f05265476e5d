// Package sandbox is one VM, the agent in it and the volumes it has been given,
// as a whole: a volume is attached to the VM, mounted by the agent, measured,
// grown on both sides and taken away again, in the only order that is safe.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
)

// baseAppend is every guest's kernel command line: a console that says little,
// a panic that ends the VM, and an agent that powers off when it is done.
const baseAppend = "console=ttyS0 loglevel=1 panic=-1 agent.directvol.poweroff=on"

// recheck is the pause before an agent that answers, but is not ready, is asked
// again: nothing tells the host when it is.
const recheck = 50 * time.Millisecond

// tryLimit is for one attempt to reach it, which a guest that boots may leave
// without an answer, and endLimit for a VM's end to be known after its vsock's.
const (
	tryLimit = 5 * time.Second
	endLimit = 5 * time.Second
)

// Config says what a sandbox is.
type Config struct {
	// ID names the sandbox.
	ID string
	// VM is its machine. Append is added to what every sandbox's kernel is told.
	VM qemu.Config
}

// Sandbox is a VM whose agent answers. It is safe for concurrent use; what
// concerns one volume happens one call at a time.
type Sandbox struct {
	id    string
	log   *logrus.Entry
	vm    *qemu.VM
	agent *agentclient.Client

	mu      sync.Mutex
	volumes map[string]*attached
}

// Start boots a sandbox, and returns when its agent has taken it on. ctx limits
// Start alone. A Start that fails leaves no VM behind.
func Start(ctx context.Context, cfg Config) (*Sandbox, error) {
	if cfg.VM.Append != "" {
		cfg.VM.Append = " " + cfg.VM.Append
	}
	cfg.VM.Append = baseAppend + cfg.VM.Append
	if cfg.VM.Log == nil {
		cfg.VM.Log = logrus.NewEntry(logrus.StandardLogger())
	}
	vm, err := qemu.Start(ctx, cfg.VM)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", cfg.ID, err)
	}
	s := &Sandbox{id: cfg.ID, log: cfg.VM.Log, vm: vm, volumes: map[string]*attached{}}
	if err := s.takeOn(ctx); err != nil {
		vm.Kill()
		return nil, fmt.Errorf("sandbox %s: %w\nboot the same by hand:\n%s", cfg.ID, err, vm.Reproduce())
	}
	return s, nil
}

func (s *Sandbox) takeOn(ctx context.Context) error {
	to, err := address.Parse(s.vm.AgentAddress())
	if err != nil {
		return err
	}
	s.agent = agentclient.New(to, agentclient.Config{Vsock: s.vm})
	if err = s.awaitAgent(ctx); err == nil {
		err = s.agent.CreateSandbox(ctx, &agentpb.CreateSandboxRequest{SandboxId: s.id})
	}
	if err != nil {
		s.agent.Close()
	}
	return err
}

// awaitAgent returns as soon as the agent is ready.
func (s *Sandbox) awaitAgent(ctx context.Context) error {
	again := time.NewTicker(recheck)
	defer again.Stop()
	for {
		err := s.tryAgent(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the agent does not answer: %w", err)
		case <-s.vm.VsockDone():
			return s.explain(ctx, err)
		case <-again.C:
		}
	}
}

func (s *Sandbox) tryAgent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tryLimit)
	defer cancel()
	return s.agent.Check(ctx)
}

// explain says that it was the VM's end that ended its vsock, where it was.
func (s *Sandbox) explain(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, endLimit)
	defer cancel()
	end, endErr := s.vm.AwaitShutdown(ctx)
	switch {
	case endErr == nil:
		return fmt.Errorf("the VM ended before its agent answered: %s, QEMU exits %d", end.Reason, end.ExitCode)
	case errors.Is(endErr, qemu.ErrEnded):
		return fmt.Errorf("the VM ended before its agent answered: %w", endErr)
	default:
		return err
	}
}

// ID returns the sandbox's name.
func (s *Sandbox) ID() string { return s.id }

// VM returns the sandbox's machine, which stays the sandbox's: its disks are
// attached and detached here.
func (s *Sandbox) VM() *qemu.VM { return s.vm }

// Agent returns the connection to the agent, which stays the sandbox's.
func (s *Sandbox) Agent() *agentclient.Client { return s.agent }
