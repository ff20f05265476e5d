package output

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// The intervals at which a running step is shown: on a terminal its line is rewritten; in a log
// each time is a new line, after a first line at the step's beginning.
const (
	terminalTick = 250 * time.Millisecond
	logTick      = 10 * time.Second
)

// Progress shows the steps of a program, one at a time, while they run and after they have ended. A
// nil *Progress shows nothing.
type Progress struct {
	w        io.Writer
	terminal bool
	columns  int // of the terminal
}

// NewProgress returns a Progress that writes to w. If w is a terminal, a running step is a single
// line that is rewritten.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w}
	p.columns, _, p.terminal = terminalSize(w)
	return p
}

// Note writes an extra line below the steps. No step may be running.
func (p *Progress) Note(format string, args ...any) {
	if p != nil {
		fmt.Fprintf(p.w, "           "+format+"\n", args...)
	}
}

// Step is one step of a program's work.
type Step struct {
	progress *Progress
	name     string
	began    time.Time
	stop     func()

	mu   sync.Mutex
	text string
}

// Begin begins a step. The caller must end it with End.
func (p *Progress) Begin(name string) *Step {
	s := &Step{progress: p, name: name, began: time.Now(), stop: func() {}}
	if p == nil {
		return s
	}
	if !p.terminal {
		fmt.Fprintf(p.w, "%s …\n", name)
	}
	s.stop = s.tick()
	return s
}

// Say sets the text about the step's progress or findings. Only the last text is shown. Say may be
// called from any goroutine.
func (s *Step) Say(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = text
}

// Said returns the text of the last Say.
func (s *Step) Said() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text
}

// End ends the step and replaces its line by a final one, with the duration, the name and the
// outcome. It returns the duration.
func (s *Step) End(outcome string) time.Duration {
	s.stop()
	took := time.Since(s.began)
	if s.progress != nil {
		s.progress.overwrite(fmt.Sprintf("%6.1f s  %s: %s\n", took.Seconds(), s.name, outcome))
	}
	return took
}

// tick shows the step at intervals until stop returns.
func (s *Step) tick() (stop func()) {
	interval := logTick
	if s.progress.terminal {
		interval = terminalTick
	}
	ticker := time.NewTicker(interval)
	end := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			select {
			case <-end:
				return
			case <-ticker.C:
				s.show()
			}
		}
	})
	return func() {
		ticker.Stop()
		close(end)
		ended.Wait()
	}
}

// show writes the line of a running step.
func (s *Step) show() {
	line := fmt.Sprintf("%6.1f s  %s …", time.Since(s.began).Seconds(), s.name)
	if text := s.Said(); text != "" {
		line += ", " + text
	}
	if s.progress.terminal {
		s.progress.overwrite(cut(line, s.progress.columns))
	} else {
		fmt.Fprintln(s.progress.w, line)
	}
}

// overwrite writes a line. On a terminal the line replaces the previous one.
func (p *Progress) overwrite(line string) {
	if p.terminal {
		line = "\r\x1b[K" + line
	}
	fmt.Fprint(p.w, line)
}

// cut shortens a line to a terminal's width, because a line that wraps could not be rewritten
// completely.
func cut(line string, columns int) string {
	runes := []rune(line)
	if len(runes) < columns {
		return line
	}
	return string(runes[:columns-2]) + "…"
}
