package killed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"

	"github.com/directvol/directvol/tests/guest/remote"
)

// asHost is the environment variable that makes this program the host's side of a guest.
const asHost = "KILLED_HOST"

// stdio is the input and output of a host's side.
type stdio struct {
	io.Reader
	io.Writer
}

// hostProcess is a process that runs a guest.
type hostProcess struct {
	command *exec.Cmd
	input   io.Closer
	lines   *remote.Lines
	send    sync.Mutex
	ended   chan struct{}

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan<- answer
}

// startHost starts a hostProcess, which logs to log.
func startHost(log io.Writer) (*hostProcess, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	h := &hostProcess{command: exec.Command(program), ended: make(chan struct{}), waiting: map[uint64]chan<- answer{}}
	h.command.Env = append(os.Environ(), asHost+"=1")
	h.command.Stderr = log
	in, err := h.command.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := h.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	h.input, h.lines = in, remote.NewLines(stdio{out, in})
	if err := h.command.Start(); err != nil {
		return nil, err
	}
	go h.receive()
	return h, nil
}

// receive passes answers on until the process ends.
func (h *hostProcess) receive() {
	defer close(h.ended)
	for {
		var a answer
		if h.lines.Receive(&a) != nil {
			_ = h.command.Process.Kill() // in case it sent nonsense
			_ = h.command.Wait()         // it was killed
			return
		}
		h.mu.Lock()
		waits := h.waiting[a.ID]
		delete(h.waiting, a.ID)
		h.mu.Unlock()
		if waits != nil {
			waits <- a
		}
	}
}

// errHostEnded is the error of a call whose process has ended.
var errHostEnded = errors.New("the host's process has ended")

// call makes the process carry out a call, and returns its result.
func (h *hostProcess) call(ctx context.Context, r request) (answer, error) {
	ended := make(chan answer, 1)
	h.mu.Lock()
	h.last++
	r.ID = h.last
	h.waiting[r.ID] = ended
	h.mu.Unlock()
	h.send.Lock()
	err := h.lines.Send(r)
	h.send.Unlock()
	if err != nil {
		return answer{}, fmt.Errorf("%s: %w: %w", r.Call, errHostEnded, err)
	}
	select {
	case a := <-ended:
		if a.Error != "" {
			return a, errors.New(a.Error)
		}
		return a, nil
	case <-h.ended:
		return answer{}, fmt.Errorf("%s: %w", r.Call, errHostEnded)
	case <-ctx.Done():
		return answer{}, fmt.Errorf("%s: %w", r.Call, context.Cause(ctx))
	}
}

// kill kills the process with SIGKILL, and returns when the process has ended.
func (h *hostProcess) kill() {
	_ = h.command.Process.Kill() // fails if it has already ended
	<-h.ended
	_ = h.input.Close()
}
