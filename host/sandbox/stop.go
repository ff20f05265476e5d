package sandbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
)

// Stop has the agent unmount everything and power off, and waits until QEMU has
// said so and exited. Where a volume is in use the error names it, and the
// sandbox goes on. It goes on as well where its VM has lost its vsock, and with it
// the way to its agent: then only Kill is left. A guest that does not end before
// ctx does is killed: that is an error too, whatever it has cost.
func (s *Sandbox) Stop(ctx context.Context) error {
	err := s.agent.DestroySandbox(ctx)
	if err != nil && !s.mayEnd(err) && ctx.Err() == nil {
		return fmt.Errorf("stop sandbox %s: %w", s.id, err)
	}
	// The guest ends when it has seen its answer taken.
	s.agent.Close()
	end, err := s.vm.AwaitShutdown(ctx)
	switch {
	case err != nil && ctx.Err() != nil:
		s.vm.Kill()
		return fmt.Errorf("stop sandbox %s: its guest did not power off in time and was killed: %w", s.id, ctx.Err())
	case err != nil:
		return fmt.Errorf("stop sandbox %s: %w", s.id, err)
	case end != orderly:
		return fmt.Errorf("stop sandbox %s: it ended otherwise than by its guest's power-off: reason %s, by the guest %v, QEMU exits %d", s.id, end.Reason, end.Guest, end.ExitCode)
	}
	return nil
}

// orderly is how a sandbox ends that was stopped.
var orderly = qemu.Shutdown{Guest: true, Reason: "guest-shutdown", ExitCode: 0}

// mayEnd says that the guest may power off though DestroySandbox has failed, or
// has done so: a connection that ends may take the answer with it.
func (s *Sandbox) mayEnd(err error) bool {
	select {
	case <-s.vm.Done():
		return true
	default:
		return errors.Is(err, agentclient.ErrOutcomeUnknown) || errors.Is(err, qemu.ErrEnded)
	}
}

// Kill ends the VM at once, as pulling the plug does.
func (s *Sandbox) Kill() {
	s.agent.Close()
	s.vm.Kill()
}
