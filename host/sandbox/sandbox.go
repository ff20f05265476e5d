// Package sandbox is one machine, the agent in it and the volumes that it has been
// given, each a state machine (State). A volume is attached to the machine, mounted by
// the agent, measured, grown on both sides and taken away again, in the only order that
// is safe. The package knows of no kind of machine: host/qemu has one.
//
// Each call may be made twice, late, be cut off, come beside its opposite or after what
// it is about has gone by itself:
//
//	call     again       after it was cut off     in the state leaving       when the disk was lost
//	attach   no change   goes on                  finishes that, then does   cleans up, then does
//	mount    looks anew  asks again (mounting)    ErrBusy                    ErrLost
//	unmount  no change   asks again (mounting)    no change                  lets go in the guest
//	resize   no change   goes on                  ErrBusy                    ErrLost
//	stats    asks        asks                     ErrBusy                    the condition says it
//	detach   no change   goes on                  finishes that              cleans up
//
// Calls of one volume wait for each other, until their contexts end; only Stats waits
// for nobody. A disk is pulled only when the agent has let go of the volume and has said
// that nobody else in the guest uses it, and its store answers. Where a create or a remove of ours had no answer,
// the next call makes sure that it has ended before it says the opposite (settle). From the moment on at which the machine was asked
// to let go of a disk the volume is leaving, whatever became of the call: nothing is
// mounted that may lose its disk a moment later.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/trial"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
)

// KernelOptions are for every sandbox's kernel: its agent powers off when it is done.
const KernelOptions = "agent.directvol.poweroff=on"

// recheck is the pause before an agent that answers, but is not ready, is asked
// again: nothing tells the host when it is.
const recheck = 50 * time.Millisecond

const (
	// tryLimit is for one attempt to reach the agent, which a guest that boots may leave
	// without an answer, and endLimit for a machine's end to be known after its vsock's.
	tryLimit = 5 * time.Second
	endLimit = 5 * time.Second
	// killLimit is how long the end of a machine that is killed is waited for, when the
	// time of who wants it is over. QEMU waits 5 s for its process to be reaped, 5 s for
	// the vsock backend's, and 2 s for its stores to close.
	killLimit = 15 * time.Second
	// stopLimit is how long a Stop lasts whose caller sets no limit.
	stopLimit = 5 * time.Minute
	// trialLimit is how long a store has for the small read that is made before a machine
	// gets it.
	trialLimit = 10 * time.Second
)

// Config says what a sandbox is.
type Config struct {
	// ID names the sandbox.
	ID string
	// Log is logrus's standard logger where it is nil.
	Log *logrus.Entry
	// Boot starts its machine, whose kernel gets KernelOptions. ctx limits the start alone.
	Boot func(ctx context.Context) (Machine, error)
}

// Sandbox is a machine whose agent answers. It is safe for concurrent use.
type Sandbox struct {
	id      string
	log     *logrus.Entry
	machine Machine
	agent   Agent
	client  *agentclient.Client                          // agent, where it is one
	try     func(ctx context.Context, path string) error // whether a store answers

	emptied atomic.Bool // the agent has said that it has unmounted everything

	mu      sync.Mutex
	volumes map[string]*volume // those with a state, and those that a call is at
}

func newSandbox(id string, log *logrus.Entry, machine Machine, agent Agent) *Sandbox {
	return &Sandbox{id: id, log: log, machine: machine, agent: agent, try: tried(new(trial.Trials)), volumes: map[string]*volume{}}
}

// tried says of a store that hangs, or may, that it does.
func tried(trials *trial.Trials) func(context.Context, string) error {
	return func(ctx context.Context, path string) error {
		err := trials.Read(ctx, path, trialLimit)
		if errors.Is(err, trial.ErrHangs) || errors.Is(err, trial.ErrUntried) {
			return also(ErrStoreHangs, err)
		}
		return err
	}
}

// Start boots a sandbox, and returns when its agent has taken it on. ctx limits
// Start alone. A Start that fails kills its machine.
func Start(ctx context.Context, cfg Config) (*Sandbox, error) {
	if cfg.Log == nil {
		cfg.Log = logrus.NewEntry(logrus.StandardLogger())
	}
	if err := trial.Prepare(ctx); err != nil { // before any store is open
		cfg.Log.WithError(err).Warn("stores are tried later than they should be")
	}
	machine, err := cfg.Boot(ctx)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", cfg.ID, err)
	}
	s, err := takeOn(ctx, cfg, machine)
	if err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
		defer cancel()
		return nil, fmt.Errorf("sandbox %s: %w\nboot the same by hand:\n%s", cfg.ID, errors.Join(err, machine.Kill(ctx)), machine.Reproduce())
	}
	return s, nil
}

func takeOn(ctx context.Context, cfg Config, machine Machine) (*Sandbox, error) {
	to, err := address.Parse(machine.AgentAddress())
	if err != nil {
		return nil, err
	}
	agent := agentclient.New(to, agentclient.Config{Vsock: machine})
	s := newSandbox(cfg.ID, cfg.Log, machine, agent)
	s.client = agent
	if err = s.awaitAgent(ctx); err == nil {
		err = agent.CreateSandbox(ctx, &agentpb.CreateSandboxRequest{SandboxId: s.id})
	}
	if err != nil {
		agent.Close()
		return nil, err
	}
	return s, nil
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
		case <-s.machine.VsockDone():
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

// explain says that it was the machine's end that ended its vsock, where it was.
func (s *Sandbox) explain(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, endLimit)
	defer cancel()
	switch end := s.machine.AwaitEnd(ctx); {
	case end == nil:
		return fmt.Errorf("its guest powered off before its agent answered: %w", err)
	case errors.Is(end, ErrEnded):
		return fmt.Errorf("it ended before its agent answered: %w", end)
	default:
		return err
	}
}

// ID returns the sandbox's name.
func (s *Sandbox) ID() string { return s.id }

// Agent returns the connection to the agent, which stays the sandbox's.
func (s *Sandbox) Agent() *agentclient.Client { return s.client }
