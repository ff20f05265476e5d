package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
)

// Stop asks the agent to unmount everything and power off, and waits until the machine has ended.
// If a volume is in use, the error names it and the sandbox keeps running. If the agent cannot be
// reached, Stop presses the power button, if the machine has one.
//
// If the outcome of the agent's call is unknown, Stop repeats the call until the agent confirms or
// refuses, or the machine ends.
//
// Stop kills a guest that does not end before ctx does, and a guest that cannot be asked, even if
// that costs data. The error then says so and names what was tried. Stop may last 15 seconds longer
// than ctx in this case (killLimit). If ctx has no deadline, Stop sets one of five minutes.
//
// It can remain unknown how the machine ended (ErrUnheard). If the agent has answered OK, it had
// unmounted everything, and Stop then succeeds.
func (s *Sandbox) Stop(ctx context.Context) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, stopLimit)
		defer cancel()
	}
	tried := ""
	err := s.askToEnd(ctx)
	switch {
	case err == nil || s.ended() || errors.Is(err, ErrEnded) || ctx.Err() != nil:
	case s.machine.VsockErr() != nil:
		if tried, err = s.pressPower(ctx, err); err != nil {
			return fmt.Errorf("stop sandbox %s: %w", s.id, errors.Join(err, s.kill(ctx)))
		}
	default:
		return fmt.Errorf("stop sandbox %s: %w", s.id, ofTake.typed(ctx, err))
	}
	// The guest powers off when its answer has been received.
	s.agent.Close()
	left := s.machine.AwaitEnd(ctx)
	if errors.Is(left, ErrUnheard) && s.emptied.Load() {
		left = nil
	}
	if left != nil && ctx.Err() != nil && !s.ended() {
		if err != nil {
			tried += fmt.Sprintf(" (%v)", err)
		}
		left = fmt.Errorf("its guest did not power off in time%s, and was killed: %w", tried, errors.Join(ctx.Err(), s.kill(ctx)))
	}
	if left != nil {
		return fmt.Errorf("stop sandbox %s: %w", s.id, left)
	}
	return nil
}

// askToEnd asks the agent to unmount everything and to power off, until the agent answers. It also
// returns nil if the machine ends meanwhile.
func (s *Sandbox) askToEnd(ctx context.Context) error {
	err := s.destroy(ctx)
	again := time.NewTicker(recheck)
	defer again.Stop()
	for errors.Is(err, agentclient.ErrOutcomeUnknown) && s.machine.VsockErr() == nil {
		select {
		case <-s.machine.Done():
			return nil
		case <-ctx.Done():
			return err
		case <-again.C:
		}
		next := s.destroy(ctx)
		switch {
		case s.machine.VsockErr() != nil: // if the guest received the earlier call, it is ending now
			return s.endedSoon(ctx, next)
		case status.Code(next) != codes.Unavailable: // Unavailable means that this call did not reach the agent
			err = next
		}
	}
	return err
}

// destroy asks the agent once.
func (s *Sandbox) destroy(ctx context.Context) error {
	err := s.agent.DestroySandbox(ctx)
	if err == nil {
		s.emptied.Store(true)
	}
	return err
}

// endedSoon returns nil if the machine ends within endLimit, and why otherwise.
func (s *Sandbox) endedSoon(ctx context.Context, why error) error {
	ctx, cancel := context.WithTimeout(ctx, endLimit)
	defer cancel()
	select {
	case <-s.machine.Done():
		return nil
	case <-ctx.Done():
		return why
	}
}

// pressPower presses the power button of a guest whose agent cannot be reached. tried is for the
// error text if the guest does not end after that.
func (s *Sandbox) pressPower(ctx context.Context, why error) (tried string, err error) {
	if !s.machine.Capabilities().PowerButton {
		return "", fmt.Errorf("its machine has no power button, and was killed: %w", why)
	}
	if err := s.machine.PressPower(ctx); err != nil {
		return "", fmt.Errorf("its power button did not work, and it was killed: %w", errors.Join(err, why))
	}
	return fmt.Sprintf(" by its power button, its agent being out of reach (%v)", why), nil
}

// kill kills the machine. It waits up to killLimit, even if ctx has ended.
func (s *Sandbox) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return s.machine.Kill(ctx)
}

// Kill ends the machine at once, like pulling the plug. If ctx ends first, the error names what is
// still running.
func (s *Sandbox) Kill(ctx context.Context) error {
	s.agent.Close()
	if err := s.machine.Kill(ctx); err != nil {
		return fmt.Errorf("kill sandbox %s: %w", s.id, err)
	}
	return nil
}
