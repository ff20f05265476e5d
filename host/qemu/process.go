package qemu

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// tailBytes is how much of what a process said last is kept for errors.
	tailBytes = 4096
	// reapTimeout is how long a process may take from closing its sockets to its end.
	reapTimeout = 5 * time.Second
)

// process is a child that lives no longer than this process, and that a Ctrl-C on the terminal does not reach.
type process struct {
	name string
	cmd  *exec.Cmd
	said *tail
	done chan struct{} // closed when it has ended
	err  error         // how it ended, once done is closed
}

// startProcess starts a child. Its standard error is kept. A child first closes the descriptors that it has inherited, which takes as
// long as a store wants that this process has open: who gives up before leaves a child that is killed as soon as it begins.
func startProcess(ctx context.Context, name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, cmd: cmd, said: &tail{}, done: make(chan struct{})}
	cmd.Stderr = p.said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = reapTimeout
	started := make(chan error)
	go func() {
		// The kernel sends Pdeathsig when the thread that forked ends, so that thread waits here.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	select {
	case err := <-started:
		if err != nil {
			return nil, fmt.Errorf("start %s: %w", name, err)
		}
		return p, nil
	case <-ctx.Done():
		go func() {
			if <-started == nil {
				p.signalKill()
			}
		}()
		return nil, fmt.Errorf("start %s: it has not begun, this process may have a store open that does not answer: %w", name, ctx.Err())
	}
}

// signalKill sends the process SIGKILL, which fails only where it has ended.
func (p *process) signalKill() { _ = p.cmd.Process.Kill() }

// kill ends the process and waits until it has ended, or says that it has not.
func (p *process) kill(patience time.Duration) error {
	p.signalKill()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case <-p.done:
		return nil
	case <-limit.C:
		return fmt.Errorf("%s was killed and has not ended after %v", p.describe(), patience)
	}
}

// describe names a process that runs, and says what the kernel has it do: D waits for a disk (proc_pid_stat(5)). It does where
// one of its threads does: of a process that was killed the others have ended, and the first is told to be a zombie (Z).
func (p *process) describe() string {
	pid := p.cmd.Process.Pid
	state := stateOf(fmt.Sprintf("/proc/%d/stat", pid))
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, thread := range threads {
		if stateOf(thread) == "D" {
			state = "D"
		}
	}
	return fmt.Sprintf("%s (process %d, state %s)", p.name, pid, state)
}

// stateOf reads the state of a process or a thread from its stat file; "?" where there is none.
func stateOf(file string) string {
	text, _ := os.ReadFile(file)
	if behind := bytes.LastIndexByte(text, ')'); behind >= 0 && len(text) > behind+2 {
		return string(text[behind+2])
	}
	return "?"
}

// running reports whether the process has not ended.
func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// state says how the process ended and what it said last. It is for a process that has ended.
func (p *process) state() string {
	state := p.cmd.ProcessState.String()
	if said := p.said.String(); said != "" {
		state += ": " + said
	}
	return state
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - tailBytes; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(p), nil
}

// String returns what was kept, without the space around it.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(t.text), "?"))
}

// drain passes on what is written to it, and goes on taking it when that fails: a pipe that nobody empties stops its writer.
type drain struct {
	to     io.Writer
	failed bool
}

func (d *drain) Write(p []byte) (int, error) {
	if !d.failed {
		_, err := d.to.Write(p)
		d.failed = err != nil
	}
	return len(p), nil
}
