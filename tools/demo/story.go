package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/tests/vm"
)

// story tells on the terminal what happens, and how long it takes.
type story struct {
	w        io.Writer
	terminal bool
	columns  int // of the terminal
	steps    []Step
}

func newStory(file *os.File) *story {
	s := &story{w: file, columns: 80, steps: []Step{}}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if s.terminal = err == nil; s.terminal && size.Col > 2 {
		s.columns = int(size.Col)
	}
	return s
}

// stepLimit ends a step that hangs, as a base for vm.Limit.
const stepLimit = 30 * time.Second

// chapter begins a part of the story.
func (s *story) chapter(format string, args ...any) {
	fmt.Fprintf(s.w, "\n"+format+"\n", args...)
}

func (s *story) note(format string, args ...any) {
	fmt.Fprintf(s.w, "           "+format+"\n", args...)
}

// step runs do as a step of the story. do says with say what it has found, or
// how far it is; what it said last stays.
func (s *story) step(ctx context.Context, name string, do func(ctx context.Context, say func(string)) error) error {
	ctx, cancel := context.WithTimeout(ctx, vm.Limit(stepLimit))
	defer cancel()
	t := &ticking{story: s, name: name, began: time.Now()}
	stop := t.start()
	err := do(ctx, t.say)
	stop()
	seconds := time.Since(t.began).Seconds()
	s.steps = append(s.steps, Step{name, seconds})
	if err != nil {
		s.overwrite(fmt.Sprintf("%6.1f s  %s: FAILED\n", seconds, name))
		return fmt.Errorf("%s: %w", name, err)
	}
	s.overwrite(fmt.Sprintf("%6.1f s  %s: ok%s\n", seconds, name, aside(t.last())))
	return nil
}

// aside is what a step has said, behind its name where there is room, and else
// below it, a sentence a line.
func aside(text string) string {
	if len(text) < 80 {
		return suffix(text)
	}
	return "\n           " + strings.ReplaceAll(text, "; ", ";\n           ")
}

func suffix(text string) string {
	if text == "" {
		return ""
	}
	return ", " + text
}

// brief is the beginning of a line that is rewritten in place: one that wraps
// would leave rows behind.
func brief(line string, columns int) string {
	runes := []rune(line)
	if len(runes) < columns {
		return line
	}
	return string(runes[:columns-2]) + "…"
}

// overwrite writes a line in place of the last one where a terminal can.
func (s *story) overwrite(line string) {
	if s.terminal {
		fmt.Fprint(s.w, "\r\x1b[K")
	}
	fmt.Fprint(s.w, line)
}

// ticking is a step that is running, and shows that it moves.
type ticking struct {
	*story
	name  string
	began time.Time

	mu   sync.Mutex
	text string
}

func (t *ticking) say(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = text
}

func (t *ticking) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text
}

// How often a step shows that it moves: on a terminal the line is rewritten,
// in a log each is a line of its own.
const (
	terminalTick = 250 * time.Millisecond
	logTick      = time.Second
)

func (t *ticking) start() (stop func()) {
	interval := logTick
	if t.terminal {
		interval = terminalTick
	}
	ticker := time.NewTicker(interval)
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			case <-ticker.C:
				line := fmt.Sprintf("%6.1f s  %s …%s", time.Since(t.began).Seconds(), t.name, suffix(t.last()))
				if t.terminal {
					t.overwrite(brief(line, t.columns))
				} else {
					fmt.Fprintln(t.w, line)
				}
			}
		}
	}()
	return func() {
		ticker.Stop()
		close(end)
		<-ended
	}
}
