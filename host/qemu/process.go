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
	// tailBytes is how much of a process's last output is kept for errors.
	tailBytes = 4096
	// reapTimeout is how long a process may take to end after closing its sockets.
	reapTimeout = 5 * time.Second
)

// process is a child process. It ends no later than this process, and a Ctrl-C on the terminal does
// not reach it.
type process struct {
	name string
	cmd  *exec.Cmd
	said *tail
	done chan struct{} // closed when the process has ended
	err  error         // how the process ended; valid once done is closed
}

// startProcess starts a child and keeps the end of its standard error. A new child first closes
// inherited descriptors. If this process has a hanging store open, that may block the child. If ctx
// ends before the child has begun, startProcess returns, and kills the child as soon as it begins.
func startProcess(ctx context.Context, name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, cmd: cmd, said: &tail{}, done: make(chan struct{})}
	cmd.Stderr = p.said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = reapTimeout
	started := make(chan error)
	go func() {
		// The kernel sends Pdeathsig when the forking thread ends, so this thread stays until the
		// child has ended.
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
		return nil, fmt.Errorf("start %s: it has not begun, perhaps because this process has a store open that does not answer: %w", name, ctx.Err())
	}
}

// signalKill sends the process SIGKILL, which fails only if the process has ended.
func (p *process) signalKill() { _ = p.cmd.Process.Kill() }

// kill kills the process and waits for its end. It fails if the process has not ended after
// patience.
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

// describe returns the name, number and state of a running process. State D means that the process
// waits for a disk (proc_pid_stat(5)). A process is in state D if any of its threads is: after a
// kill the other threads have ended, and the first one is reported as a zombie (Z).
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

// stateOf reads the state of a process or a thread from its stat file; "?" if the file is missing.
func stateOf(file string) string {
	text, _ := os.ReadFile(file)
	if behind := bytes.LastIndexByte(text, ')'); behind >= 0 && len(text) > behind+2 {
		return string(text[behind+2])
	}
	return "?"
}

// running reports whether the process is still running.
func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// state describes how the process ended and its last output. Call it only after the process has
// ended.
func (p *process) state() string {
	state := p.cmd.ProcessState.String()
	if said := p.said.String(); said != "" {
		state += ": " + said
	}
	return state
}

// tail keeps the end of the data written to it.
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

// String returns the kept text without surrounding space.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(t.text), "?"))
}

// drain passes data on to a writer. After a write error it discards the data instead, because a
// pipe that is not read would block its writer.
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
