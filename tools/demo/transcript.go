package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/tests/vm"
)

// transcript shows what happens and how long it takes.
type transcript struct {
	*output.Progress
	w     io.Writer
	steps []Step
}

func newTranscript(w io.Writer) *transcript {
	return &transcript{Progress: output.NewProgress(w), w: w, steps: []Step{}}
}

// stepLimit ends a step that hangs, as a base for vm.Limit.
const stepLimit = 30 * time.Second

// section begins a part of the transcript.
func (s *transcript) section(format string, args ...any) {
	fmt.Fprintf(s.w, "\n"+format+"\n", args...)
}

// step runs do as a step of the transcript. do says with say what it has found, or
// how far it is; what it said last stays.
func (s *transcript) step(ctx context.Context, name string, do func(ctx context.Context, say func(string)) error) error {
	limited, cancel := context.WithTimeout(ctx, vm.Limit(stepLimit))
	defer cancel()
	running := s.Begin(name)
	err := do(limited, running.Say)
	outcome := "ok" + aside(running.Said())
	if err != nil {
		outcome = "FAILED"
		if ctx.Err() != nil {
			outcome = "interrupted"
		}
		err = fmt.Errorf("%s: %w", name, err)
	}
	s.steps = append(s.steps, Step{name, running.End(outcome).Seconds()})
	return err
}

// aside is what a step has said, behind its name where there is room, and else
// below it, a sentence a line.
func aside(text string) string {
	switch {
	case text == "":
		return ""
	case len(text) < 80:
		return ", " + text
	}
	return "\n           " + strings.ReplaceAll(text, "; ", ";\n           ")
}
