package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How often a step shows that it moves: on a terminal its line is rewritten, in a log each is a line of its own.
const (
	terminalTick = 250 * time.Millisecond
	logTick      = 10 * time.Second
)

// progress tells on the terminal what is being done, and for how long.
type progress struct {
	w        io.Writer
	terminal bool
}

func newProgress(file *os.File) *progress {
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return &progress{w: file, terminal: err == nil}
}

func (p *progress) note(format string, args ...any) {
	fmt.Fprintf(p.w, "          "+format+"\n", args...)
}

// step runs do, which says with say how far it is; what it said last stays.
func (p *progress) step(name string, do func(say func(string)) error) error {
	s := &step{progress: p, name: name, began: time.Now()}
	stop := s.tick()
	err := do(s.say)
	stop()
	switch {
	case err == nil:
		s.show("\n")
	case p.terminal:
		fmt.Fprint(p.w, "\r\x1b[K")
	}
	return err
}

// step is something that is being done.
type step struct {
	*progress
	name  string
	began time.Time

	mu   sync.Mutex
	text string
}

func (s *step) say(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = text
}

func (s *step) show(end string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.terminal {
		fmt.Fprint(s.w, "\r\x1b[K")
	}
	fmt.Fprintf(s.w, "%6.1f s  %s: %s%s", time.Since(s.began).Seconds(), s.name, s.text, end)
}

// tick shows the step again and again, until stop.
func (s *step) tick() (stop func()) {
	interval, end := logTick, "\n"
	if s.terminal {
		interval, end = terminalTick, ""
	}
	ticker := time.NewTicker(interval)
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-over:
				return
			case <-ticker.C:
				s.show(end)
			}
		}
	}()
	return func() {
		ticker.Stop()
		close(over)
		<-ended
	}
}
