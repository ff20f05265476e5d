package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/rescue"
)

// stepPrinter prints each step to standard error, when it begins and when it has
// ended. On a terminal the step that is under way shows how long it has taken.
type stepPrinter struct {
	to    io.Writer
	clock func() // ends the clock of the step under way; nil where there is none
}

func (p *stepPrinter) tell(s rescue.Step) {
	if !s.Done {
		if isTerminal(p.to) {
			p.clock = startClock(p.to, s.Name)
		} else {
			fmt.Fprintf(p.to, "%s …\n", s.Name)
		}
		return
	}
	if p.clock != nil {
		p.clock()
		p.clock = nil
	}
	state := "ok"
	if s.Err != nil {
		state = "failed"
	}
	if s.Detail != "" {
		state += ", " + s.Detail
	}
	fmt.Fprintf(p.to, "%7.1f s  %s: %s\n", s.Took.Seconds(), s.Name, state)
}

// startClock shows the seconds of a step until it is ended, and then clears the line.
func startClock(to io.Writer, name string) (end func()) {
	began := time.Now()
	ticks := time.NewTicker(time.Second)
	done := make(chan struct{})
	var drawn sync.WaitGroup
	drawn.Go(func() {
		defer fmt.Fprint(to, "\r\x1b[K")
		for {
			fmt.Fprintf(to, "\r%7.0f s  %s …", time.Since(began).Seconds(), name)
			select {
			case <-ticks.C:
			case <-done:
				return
			}
		}
	})
	return func() {
		ticks.Stop()
		close(done)
		drawn.Wait()
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
