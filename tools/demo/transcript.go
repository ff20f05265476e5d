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

// transcript prints the steps and their durations.
type transcript struct {
	*output.Progress
	w     io.Writer
	steps []Step
	watch *watch // nil until there is a guest
}

func newTranscript(w io.Writer) *transcript {
	return &transcript{Progress: output.NewProgress(w), w: w, steps: []Step{}}
}

// stepLimit ends a step that hangs, as a base for vm.Limit.
const stepLimit = 30 * time.Second

// section prints the heading of a part of the transcript.
func (s *transcript) section(format string, args ...any) {
	fmt.Fprintf(s.w, "\n"+format+"\n", args...)
}

// step runs do as a step of the transcript. do calls say to report its progress or its result; the
// last text stays on the terminal. What the watch has seen meanwhile follows, a line for each
// change.
func (s *transcript) step(ctx context.Context, name string, do func(ctx context.Context, say func(string)) error) error {
	limited, cancel := context.WithTimeout(ctx, vm.Limit(stepLimit))
	defer cancel()
	s.seen()
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
	s.seen()
	return err
}

// seen prints what the watch has seen since the last call.
func (s *transcript) seen() {
	for _, line := range s.watch.begin() {
		s.Note("%s", line)
	}
}

// aside formats the text of a step: after the step's name if there is room, otherwise below it, one
// part of the sentence per line.
func aside(text string) string {
	switch {
	case text == "":
		return ""
	case len(text) < 80:
		return ", " + text
	}
	return "\n           " + strings.ReplaceAll(text, "; ", ";\n           ")
}
