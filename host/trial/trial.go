// Package trial tests whether a store on the host answers, by a small read in a separate process.
// If the store hangs, like a dead network disk, it blocks only that process. A killed process that
// waits for a disk ends only when the disk answers (TASK_UNINTERRUPTIBLE); so there is at most one
// such process per store, however often the store is tried.
//
// The process is this program under another name: any program that imports the package can play it.
// It is started by a process that has no store open (Prepare), because otherwise one hanging store
// would prevent every process from starting.
package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

var (
	// ErrHangs means that the store has not answered in time.
	ErrHangs = errors.New("the store does not answer")
	// ErrUntried means that a trial gave no result: the store may hang.
	ErrUntried = errors.New("the store was not tried")
	// ErrUnreached means that the path does not lead the trial's process to a store, or that the
	// process may not open it. The error says nothing about whether the store hangs.
	ErrUnreached = errors.New("the store was not reached")
)

// ErrNoStore is the process's error for a path that leads to something else. The caller receives
// only its text.
var ErrNoStore = errors.New("a store is an image file or a block device")

// unreached is an error that is ErrUnreached too. Its text is the process's, which says so.
type unreached struct{ error }

func (unreached) Is(target error) bool { return target == ErrUnreached }

// childName is the name of the process that tries a store.
const childName = "directvol-store-trial"

func init() {
	if len(os.Args) == 1 && os.Args[0] == starterName {
		serve(os.Stdin, os.Stdout)
		os.Exit(0)
	}
	if len(os.Args) == 2 && os.Args[0] == childName {
		err := read(os.Args[1])
		if err != nil {
			fmt.Fprint(os.Stderr, err)
		}
		os.Exit(statusOf(err))
	}
}

// The exit statuses of the process that tries a store. Another status, such as a Go program's 2
// after a panic, is no result.
const (
	statusAnswered = iota
	statusFailed
	_
	statusUnreached
)

func statusOf(err error) int {
	switch {
	case err == nil:
		return statusAnswered
	case errors.Is(err, ErrUnreached):
		return statusUnreached
	}
	return statusFailed
}

// pageBytes is the length of the read. O_DIRECT requires memory and length to be aligned to the
// store's blocks, which have at most 4096 bytes.
const pageBytes = 4096

// read reads the first bytes of a store, and bypasses the page cache if possible.
func read(path string) error {
	found, err := find(path)
	if err != nil {
		return err
	}
	defer unix.Close(found)
	same := "/proc/self/fd/" + strconv.Itoa(found)
	file, err := os.OpenFile(same, os.O_RDONLY|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) { // the filesystem does not support O_DIRECT, such as an older tmpfs
		file, err = os.OpenFile(same, os.O_RDONLY, 0)
	}
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("%w: %s: %w", ErrUnreached, path, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer file.Close()
	buffer := make([]byte, 2*pageBytes)
	skip := -int(uintptr(unsafe.Pointer(&buffer[0]))) & (pageBytes - 1)
	if _, err := unix.Pread(int(file.Fd()), buffer[skip:skip+pageBytes], 0); err != nil {
		return &os.PathError{Op: "read", Path: path, Err: err}
	}
	return nil
}

// find returns a descriptor that only refers to a store (O_PATH). Opening for reading would block
// on a FIFO, wind a tape, and start a watchdog.
func find(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("%w: %w", ErrUnreached, &os.PathError{Op: "open", Path: path, Err: err})
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if kind := st.Mode & unix.S_IFMT; err == nil && kind != unix.S_IFREG && kind != unix.S_IFBLK {
		err = ErrNoStore
	}
	if err != nil {
		unix.Close(fd)
		return -1, &os.PathError{Op: "look at", Path: path, Err: err}
	}
	return fd, nil
}

// Trials holds the trials in progress. The zero value is ready to use.
type Trials struct {
	mu      sync.Mutex
	running map[string]*running // by path
}

// startLimit is how long the start of a process may take.
const startLimit = 10 * time.Second

// running is a trial's process, or one that is being started.
type running struct {
	ended chan struct{}
	err   error // the result; valid once ended is closed

	mu      sync.Mutex
	pid     int           // 0 until the process runs
	late    chan struct{} // closed when the time limit has passed without an answer
	overdue *time.Timer   // closes late
}

// newRunning returns a running whose process has the time limit to start.
func newRunning(limit time.Duration) *running {
	r := &running{ended: make(chan struct{}), late: make(chan struct{})}
	r.have(limit)
	return r
}

// have restarts the time limit. r.mu must be held, or r must be new.
func (r *running) have(limit time.Duration) {
	late := r.late
	r.overdue = time.AfterFunc(limit, func() { close(late) })
}

// whenLate returns a channel that is closed when the time limit has passed.
func (r *running) whenLate() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.late
}

// Read returns when a store has answered. The error wraps ErrHangs if the store has not answered
// within limit, ErrUntried if the trial gave no result, and ErrUnreached if the path led to no
// store. If several callers try a store at once, the first caller's limit counts. If ctx ends
// first, the error says nothing about the store. Starting the process may take up to ten more
// seconds.
func (t *Trials) Read(ctx context.Context, path string, limit time.Duration) error {
	r, joined := t.start(path, limit)
	select {
	case <-r.ended:
	case <-r.whenLate():
		return r.tooLate(path)
	case <-ctx.Done():
		return fmt.Errorf("try store %s: it has not answered yet: %w", path, ctx.Err())
	}
	if joined && r.err != nil { // that trial's result is out of date
		return t.Read(ctx, path, limit)
	}
	return r.err
}

// tooLate returns the error for a trial whose time limit has passed.
func (r *running) tooLate(path string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pid == 0 { // nothing is known about the store
		return fmt.Errorf("try store %s: %w: no process for it could be started in time, perhaps because this process has another store open that does not answer", path, ErrUntried)
	}
	return fmt.Errorf("try store %s: %w: process %d waits for a small read", path, ErrHangs, r.pid)
}

// start starts a trial, or joins the one in progress. It does not block.
func (t *Trials) start(path string, limit time.Duration) (r *running, joined bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.running[path]; r != nil {
		return r, true
	}
	r = newRunning(startLimit)
	if t.running == nil {
		t.running = map[string]*running{}
	}
	t.running[path] = r
	end := func(err error) {
		r.stopClock()
		r.err = err
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.running, path)
		close(r.ended)
	}
	go func() {
		var err error
		for range 2 { // a starter may have ended unnoticed
			if err = have(path, limit, func(said report) {
				if !said.Ended {
					r.runs(said.PID, limit)
					return
				}
				end(said.err(path, limit))
			}); err == nil {
				return
			}
		}
		end(fmt.Errorf("try store %s: %w: %w", path, ErrUntried, err))
	}()
	return r, false
}

// runs records that the process runs, and restarts the time limit. If the limit for starting has
// already passed, callers have given up, but that shows nothing about the store.
func (r *running) runs(pid int, limit time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pid = pid
	if !r.overdue.Stop() {
		r.late = make(chan struct{})
	}
	r.have(limit)
}

func (r *running) stopClock() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.overdue.Stop()
}

// err returns the error for a report of a trial's end.
func (r report) err(path string, limit time.Duration) error {
	switch {
	case r.Hangs:
		return fmt.Errorf("try store %s: %w: a small read took more than %v", path, ErrHangs, limit)
	case r.Lost:
		return fmt.Errorf("try store %s: %w: %s", path, ErrUntried, r.Error)
	case r.Unreached:
		return unreached{fmt.Errorf("try store %s: %s", path, r.Error)}
	case r.Error != "":
		return fmt.Errorf("try store %s: %s", path, r.Error)
	}
	return nil
}
