package sandbox

import (
	"context"
	"io"

	"github.com/sirupsen/logrus"
)

// New returns a sandbox over any machine and agent. try replaces the trial of stores.
func New(machine Machine, agent Agent, try func(context.Context, string) error) *Sandbox {
	log := logrus.New()
	log.SetOutput(io.Discard)
	s := newSandbox("test", logrus.NewEntry(log), machine, agent)
	s.try = try
	return s
}

// AwaitAgent exports awaitAgent.
func (s *Sandbox) AwaitAgent(ctx context.Context) error { return s.awaitAgent(ctx) }
