// Package trial finds out whether a store on the host answers, by a small read in a
// process of its own: a store that hangs, such as a dead network disk, then holds up that
// process and nothing else. What is killed while it waits for a disk ends when the disk
// answers (TASK_UNINTERRUPTIBLE): there is at most one such process a store, however
// often it is tried.
//
// The process is this program once more, with another name: importing the package makes
// any program able to be it. It is started by one that has no store open (Prepare), for
// otherwise one store that hangs would keep every process from being started.
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
	// ErrHangs is the failure of a store that has not answered in time.
	ErrHangs = errors.New("the store does not answer")
	// ErrUntried is the failure of a trial that tells nothing of its store: it may hang.
	ErrUntried = errors.New("the store was not tried")
)

// ErrNoStore is what the process says of a path that leads to something else. It reaches the
// caller as text alone.
var ErrNoStore = errors.New("a store is an image file or a block device")

// childName is the name that the process has.
const childName = "directvol-store-trial"

func init() {
	if len(os.Args) == 1 && os.Args[0] == starterName {
		serve(os.Stdin, os.Stdout)
		os.Exit(0)
	}
	if len(os.Args) == 2 && os.Args[0] == childName {
		if err := read(os.Args[1]); err != nil {
			fmt.Fprint(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// pageBytes is what is read: O_DIRECT wants memory and length aligned to the store's
// blocks, which have 4096 bytes at most.
const pageBytes = 4096

// read reads the first bytes of a store, from the store and not from memory where that
// is possible.
func read(path string) error {
	found, err := find(path)
	if err != nil {
		return err
	}
	defer unix.Close(found)
	same := "/proc/self/fd/" + strconv.Itoa(found)
	file, err := os.OpenFile(same, os.O_RDONLY|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) { // a filesystem without it, such as an older tmpfs
		file, err = os.OpenFile(same, os.O_RDONLY, 0)
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

// find returns a descriptor that only names a store (O_PATH): opening a FIFO waits, opening
// a tape winds, and opening a watchdog starts it.
func find(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
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

// Trials are the trials under way. The zero value is ready.
type Trials struct {
	mu      sync.Mutex
	running map[string]*running // by path
}

// startLimit is how long a process has to run.
const startLimit = 10 * time.Second

// running is one process, or one that is to run.
type running struct {
	ended chan struct{}
	err   error // what it found, once ended is closed

	mu      sync.Mutex
	pid     int           // 0 until it runs
	late    chan struct{} // closed when it had its time, and has not answered
	overdue *time.Timer   // closes late
}

// newRunning returns one that has so much time to begin.
func newRunning(limit time.Duration) *running {
	r := &running{ended: make(chan struct{}), late: make(chan struct{})}
	r.have(limit)
	return r
}

// have gives it so much time from now on. r.mu is held, or r is new.
func (r *running) have(limit time.Duration) {
	late := r.late
	r.overdue = time.AfterFunc(limit, func() { close(late) })
}

// whenLate returns a channel that is closed when it had its time.
func (r *running) whenLate() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.late
}

// Read returns when a store has answered. ErrHangs is wrapped where the store had so much time for it as limit says, which its
// first caller sets, and ErrUntried where nothing is known of it; who gives up before learns nothing about the store. That a process runs may take up to ten seconds more.
func (t *Trials) Read(ctx context.Context, path string, limit time.Duration) error {
	r, joined := t.start(path, limit)
	select {
	case <-r.ended:
	case <-r.whenLate():
		return r.tooLate(path)
	case <-ctx.Done():
		return fmt.Errorf("try store %s: it has not answered yet: %w", path, ctx.Err())
	}
	if joined && r.err != nil { // it tells of a time that is over
		return t.Read(ctx, path, limit)
	}
	return r.err
}

// tooLate is the answer to who has waited as long as the store had time.
func (r *running) tooLate(path string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pid == 0 { // of the store nothing is known
		return fmt.Errorf("try store %s: %w: no process for it could be started in time: this one may have another store open that does not answer", path, ErrUntried)
	}
	return fmt.Errorf("try store %s: %w a small read, which process %d waits for", path, ErrHangs, r.pid)
}

// start starts a trial, or joins the one that goes on. It waits for nobody.
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
		for range 2 { // a starter may have ended before anybody noticed
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

// runs notes that the process does, which has so much time from now on. Who waited for it to begin may have given up; of the store
// nothing is known by that.
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

// err is what a report of a trial's end means.
func (r report) err(path string, limit time.Duration) error {
	switch {
	case r.Hangs:
		return fmt.Errorf("try store %s: %w a small read within %v", path, ErrHangs, limit)
	case r.Lost:
		return fmt.Errorf("try store %s: %w: %s", path, ErrUntried, r.Error)
	case r.Error != "":
		return fmt.Errorf("try store %s: %s", path, r.Error)
	}
	return nil
}
