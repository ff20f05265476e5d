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

// Stop has the agent unmount everything and power off, and waits until the machine has
// ended. Where a volume is in use the error names it, and the sandbox goes on. An agent
// that cannot be reached is asked by the power button, where the machine has one.
//
// A call whose outcome is unknown is made again until the agent says that it is done, or
// refuses, or the machine ends: nobody knows whether the guest was asked.
//
// A guest that does not end before ctx does is killed, whatever that costs, and so is one
// that nobody can ask: the error says so, and what has been tried. It may take 15 seconds
// longer than ctx then (killLimit). A ctx without a deadline has one of five minutes.
//
// Nobody may hear how the machine ended (ErrUnheard). An agent that has answered with OK has
// unmounted everything before: then Stop has done what it was to.
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
	// The guest ends when it has seen its answer taken.
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

// askToEnd asks the agent to unmount everything and to power off, until it answers. It
// returns nil too where the machine ends meanwhile.
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
		case s.machine.VsockErr() != nil: // a guest that has heard the call before ends now
			return s.endedSoon(ctx, next)
		case status.Code(next) != codes.Unavailable: // else it was not asked
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

// endedSoon returns nil where the machine ends in the next moment, or else why.
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

// pressPower asks a guest to power off whose agent cannot be reached, and returns what to
// say of that when it did not help.
func (s *Sandbox) pressPower(ctx context.Context, why error) (tried string, err error) {
	if !s.machine.Capabilities().PowerButton {
		return "", fmt.Errorf("its machine has no power button, and was killed: %w", why)
	}
	if err := s.machine.PressPower(ctx); err != nil {
		return "", fmt.Errorf("its power button did not work, and it was killed: %w", errors.Join(err, why))
	}
	return fmt.Sprintf(" by its power button, its agent being out of reach (%v)", why), nil
}

// kill ends the machine when ctx has, or is about to.
func (s *Sandbox) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return s.machine.Kill(ctx)
}

// Kill ends the machine at once, as pulling the plug does. An error says what is left
// running when ctx ends.
func (s *Sandbox) Kill(ctx context.Context) error {
	s.agent.Close()
	if err := s.machine.Kill(ctx); err != nil {
		return fmt.Errorf("kill sandbox %s: %w", s.id, err)
	}
	return nil
}
