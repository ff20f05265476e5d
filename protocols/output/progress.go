package output

import (
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How often a step shows that it moves: on a terminal its line is rewritten, in a log each is a line of its own, after one when it begins.
const (
	terminalTick = 250 * time.Millisecond
	logTick      = 10 * time.Second
)

// Progress shows the steps of a program, one at a time, while they run and when they have ended. A nil *Progress shows nothing.
type Progress struct {
	w        io.Writer
	terminal bool
	columns  int // of the terminal
}

// NewProgress writes to w. Where w is a terminal, the step that runs is one line that is rewritten.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w, columns: 80}
	file, ok := w.(interface{ Fd() uintptr }) // an *os.File, or what wraps one
	if !ok {
		return p
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if p.terminal = err == nil; p.terminal && size.Col > 2 {
		p.columns = int(size.Col)
	}
	return p
}

// Note writes a line below the steps. No step may be running.
func (p *Progress) Note(format string, args ...any) {
	if p != nil {
		fmt.Fprintf(p.w, "           "+format+"\n", args...)
	}
}

// Step is something that a program does.
type Step struct {
	progress *Progress
	name     string
	began    time.Time
	stop     func()

	mu   sync.Mutex
	text string
}

// Begin begins a step, which the caller ends with End.
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

// Say says how far the step is, or what it has found. Only the last text is shown. It may be called from any goroutine.
func (s *Step) Say(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text = text
}

// Said returns the last text of Say.
func (s *Step) Said() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text
}

// End replaces the line that moves with one that stays: how long the step took, its name and its outcome. It returns how long that was.
func (s *Step) End(outcome string) time.Duration {
	s.stop()
	took := time.Since(s.began)
	if s.progress != nil {
		s.progress.overwrite(fmt.Sprintf("%6.1f s  %s: %s\n", took.Seconds(), s.name, outcome))
	}
	return took
}

// tick shows the step again and again, until stop returns.
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

// show writes the line of a step that runs.
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

// overwrite writes a line in place of the last one where a terminal can.
func (p *Progress) overwrite(line string) {
	if p.terminal {
		line = "\r\x1b[K" + line
	}
	fmt.Fprint(p.w, line)
}

// cut shortens a line that is rewritten in place to a terminal's width: one that wraps would leave rows behind.
func cut(line string, columns int) string {
	runes := []rune(line)
	if len(runes) < columns {
		return line
	}
	return string(runes[:columns-2]) + "…"
}
