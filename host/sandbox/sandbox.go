// Package sandbox manages one virtual machine, its agent, and the volumes given to it. Each volume
// has a State. A volume is attached to the machine, mounted by the agent, measured, grown on both
// sides and removed again, in the only safe order. The package does not depend on a kind of
// machine: host/qemu implements one.
//
// Each call may be repeated, come late, be interrupted, run concurrently with its opposite, or come
// after its disk has left by itself:
//
//	call     again         after interruption     in the state leaving          after the disk was lost
//	attach   no change     resumes                finishes that, then attaches  cleans up, then attaches
//	mount    checks again  asks again (mounting)  ErrBusy                       ErrLost
//	unmount  no change     asks again (mounting)  no change                     unmounts in the guest
//	resize   no change     resumes                ErrBusy                       ErrLost
//	stats    asks again    asks again             ErrBusy                       reports it as a condition
//	detach   no change     resumes                finishes that                 cleans up
//
// Calls on one volume wait for each other until their contexts end; only Stats does not wait. A
// disk is removed only after the agent has released the volume and confirmed that nothing else in
// the guest uses it, and only if its store answers.
//
// If the sandbox got no answer to a create or remove call, the next call first makes sure that the
// old one has ended, before it requests the opposite (settle).
//
// A volume is in the state leaving from the moment when the machine is asked to release its disk,
// whatever becomes of that call. So nothing is mounted whose disk may disappear a moment later.
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

// KernelOptions are options for every sandbox's kernel: they make the agent power the guest off
// when it is done.
const KernelOptions = "agent.directvol.poweroff=on"

// recheck is the pause before an agent that answers but is not ready is asked again. Nothing
// notifies the host when the agent becomes ready.
const recheck = 50 * time.Millisecond

const (
	// tryLimit limits one attempt to reach the agent, because a booting guest may not answer.
	// endLimit limits the wait for a machine's end after its vsock has ended.
	tryLimit = 5 * time.Second
	endLimit = 5 * time.Second
	// killLimit is how long to wait for the end of a killed machine after the caller's context has
	// ended. QEMU needs up to 5 s until its process is reaped, 5 s for the vsock backend's, and 2 s
	// for its stores to close.
	killLimit = 15 * time.Second
	// stopLimit limits a Stop whose caller sets no deadline.
	stopLimit = 5 * time.Minute
	// trialLimit is how long a store may take for the small read before a machine gets it.
	trialLimit = 10 * time.Second
)

// Config describes a sandbox.
type Config struct {
	// ID names the sandbox.
	ID string
	// Log is the logger; nil means logrus's standard logger.
	Log *logrus.Entry
	// Boot starts the sandbox's machine. The kernel's options must include KernelOptions. ctx
	// limits the start alone.
	Boot func(ctx context.Context) (Machine, error)
}

// Sandbox is a machine whose agent answers. It is safe for concurrent use.
type Sandbox struct {
	id      string
	log     *logrus.Entry
	machine Machine
	agent   Agent
	client  *agentclient.Client                          // the agent, if it is an *agentclient.Client
	try     func(ctx context.Context, path string) error // tries whether a store answers

	emptied atomic.Bool // the agent has confirmed that everything is unmounted

	mu      sync.Mutex
	volumes map[string]*volume // volumes with a state, and volumes with a call in progress
}

func newSandbox(id string, log *logrus.Entry, machine Machine, agent Agent) *Sandbox {
	return &Sandbox{id: id, log: log, machine: machine, agent: agent, try: tried(new(trial.Trials).Read), volumes: map[string]*volume{}}
}

// tried returns a function that tries a store by read, which is Trials.Read, and returns
// ErrStoreHangs if the store hangs or may hang.
func tried(read func(context.Context, string, time.Duration) error) func(context.Context, string) error {
	return func(ctx context.Context, path string) error {
		err := read(ctx, path, trialLimit)
		if errors.Is(err, trial.ErrHangs) || errors.Is(err, trial.ErrUntried) {
			return also(ErrStoreHangs, err)
		}
		return err
	}
}

// Start boots a sandbox, and returns when its agent has accepted it. ctx limits Start alone. A
// failed Start kills its machine.
func Start(ctx context.Context, cfg Config) (*Sandbox, error) {
	if cfg.Log == nil {
		cfg.Log = logrus.NewEntry(logrus.StandardLogger())
	}
	if err := trial.Prepare(ctx); err != nil { // must run before any store is open
		cfg.Log.WithError(err).Warn("the process that tries stores starts late")
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

// explain returns the machine's end as the reason if that ended the vsock.
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

// ID returns the sandbox's id.
func (s *Sandbox) ID() string { return s.id }

// Agent returns the connection to the agent. The sandbox owns it.
func (s *Sandbox) Agent() *agentclient.Client { return s.client }
