package trial

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// starterName is the name of the starter: the process that starts the trials.
const starterName = "directvol-store-trials"

// order asks the starter to try a store. Path is a byte slice because a path need not be UTF-8.
type order struct {
	ID    uint64
	Path  []byte
	Limit time.Duration
}

// report is the starter's answer to an order: a first report with the trial's process number, and a
// second one with the result.
type report struct {
	ID    uint64
	PID   int
	Ended bool
	Hangs bool
	Error string // "" if the store has answered
	Lost  bool   // the trial ended without a result about the store
	// Unreached is true if the trial's process did not get to a store.
	Unreached bool
}

// starter is the starter process, as seen by its parent.
type starter struct {
	orders *json.Encoder
	end    io.Closer
	over   chan struct{} // closed when the process has ended

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]func(report)
	err     error // why the process has ended
}

var (
	startersMu sync.Mutex
	latest     *starter
	next       *attempt // nil if there is none in progress
)

// attempt is an attempt to start a starter. A store that hangs can delay it as long as the store
// hangs.
type attempt struct {
	ended chan struct{}
	s     *starter // set when ended is closed, unless err is
	err   error
}

// Prepare starts the process that starts the trials, if it is not running. Call Prepare before
// opening stores. The reason: a new process first closes the descriptors that it inherits, and to
// close a hanging store's descriptor may take as long as the store hangs (flush of FUSE, NFS). So
// trials are started by a process that has no store open. If this process already has a hanging
// store open, Prepare gives up after ten seconds, or when ctx ends; what it has begun continues.
func Prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	_, err := current(ctx)
	return err
}

// current returns the running starter, or starts one.
func current(ctx context.Context) (*starter, error) {
	startersMu.Lock()
	if latest != nil && latest.ended() == nil {
		defer startersMu.Unlock()
		return latest, nil
	}
	if next == nil {
		next = &attempt{ended: make(chan struct{})}
		go next.run()
	}
	mine := next
	startersMu.Unlock()
	select {
	case <-mine.ended:
		return mine.s, mine.err
	case <-ctx.Done():
		return nil, fmt.Errorf("start the process that starts the trials: it has not begun, perhaps because this process has a store open that does not answer: %w", ctx.Err())
	}
}

func (a *attempt) run() {
	a.s, a.err = newStarter()
	startersMu.Lock()
	defer startersMu.Unlock()
	if next = nil; a.err == nil {
		latest = a.s
	}
	close(a.ended)
}

func newStarter() (*starter, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{starterName}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &starter{orders: json.NewEncoder(in), end: in, over: make(chan struct{}), waiting: map[uint64]func(report){}}
	go func() {
		s.read(out)
		in.Close()
		_ = cmd.Wait() // the starter ends when its input ends
		close(s.over)
	}()
	return s, nil
}

// read delivers reports until the starter ends.
func (s *starter) read(out io.Reader) {
	reports := json.NewDecoder(out)
	var err error
	for {
		var r report
		if err = reports.Decode(&r); err != nil {
			break
		}
		s.mu.Lock()
		tell := s.waiting[r.ID]
		if r.Ended {
			delete(s.waiting, r.ID)
		}
		s.mu.Unlock()
		if tell != nil {
			tell(r)
		}
	}
	s.mu.Lock()
	s.err = fmt.Errorf("the process that starts the trials has ended: %w", err)
	left := s.waiting
	s.waiting = nil
	s.mu.Unlock()
	for id, tell := range left {
		tell(report{ID: id, Ended: true, Error: s.err.Error(), Lost: true})
	}
}

func (s *starter) ended() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// have makes the running starter try a store.
func have(path string, limit time.Duration, tell func(report)) error {
	s, err := current(context.Background()) // callers that wait for the trial give up earlier
	if err != nil {
		return err
	}
	return s.order(path, limit, tell)
}

// order asks the starter to try a store. tell is called with each report about it.
func (s *starter) order(path string, limit time.Duration, tell func(report)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.last++
	s.waiting[s.last] = tell
	if err := s.orders.Encode(order{s.last, []byte(path), limit}); err != nil {
		delete(s.waiting, s.last)
		s.err = fmt.Errorf("the process that starts the trials does not read its orders: %w", err)
		return s.err
	}
	return nil
}

// serve is the main function of the starter. It carries out orders until its input ends, and then
// kills the trials that still run.
func serve(in io.Reader, out io.Writer) {
	var mu sync.Mutex
	reports := json.NewEncoder(out)
	tell := func(r report) {
		mu.Lock()
		defer mu.Unlock()
		_ = reports.Encode(r) // after an error nobody reads the reports, and the orders end too
	}
	running := map[*os.Process]bool{}
	orders := json.NewDecoder(in)
	for {
		var o order
		if orders.Decode(&o) != nil {
			mu.Lock() // never unlocked, so that no further report is sent
			for p := range running {
				_ = p.Kill()
			}
			return
		}
		cmd := exec.Command("/proc/self/exe")
		cmd.Args = []string{childName, string(o.Path)}
		var said strings.Builder
		cmd.Stderr = &said
		if err := cmd.Start(); err != nil {
			tell(report{ID: o.ID, Ended: true, Error: err.Error(), Lost: true})
			continue
		}
		mu.Lock()
		running[cmd.Process] = true
		mu.Unlock()
		tell(report{ID: o.ID, PID: cmd.Process.Pid})
		go func() {
			r := awaitChild(cmd, o.Limit, &said)
			mu.Lock()
			delete(running, cmd.Process)
			mu.Unlock()
			r.ID = o.ID
			tell(r)
		}()
	}
}

// awaitChild waits until a trial has ended, and kills it after its time limit.
func awaitChild(cmd *exec.Cmd, limit time.Duration, said *strings.Builder) report {
	overdue := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() }) // fails only if the process has ended
	err := cmd.Wait()
	r := report{PID: cmd.Process.Pid, Ended: true, Hangs: !overdue.Stop()}
	if err == nil {
		return r
	}
	r.Error = errors.Join(err, errors.New(said.String())).Error()
	switch cmd.ProcessState.ExitCode() {
	case statusFailed:
	case statusUnreached:
		r.Unreached = true
	default:
		r.Lost = true
	}
	return r
}
