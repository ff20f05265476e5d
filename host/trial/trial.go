// Package trial finds out whether a store on the host answers, by a small read in a
// process of its own: a store that hangs, such as a dead network disk, then holds up that
// process and nothing else. What is killed while it waits for a disk ends when the disk
// answers (TASK_UNINTERRUPTIBLE): there is at most one such process a store, however
// often it is tried.
//
// The process is this program once more, with another name: importing the package makes
// any program able to be it.
package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrHangs is the failure of a store that has not answered in time.
var ErrHangs = errors.New("the store does not answer")

// ErrNoStore is what the process says of a path that leads to something else. It reaches the
// caller as text alone.
var ErrNoStore = errors.New("a store is an image file or a block device")

// childName is the name that the process has.
const childName = "directvol-store-trial"

func init() {
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

// running is one process.
type running struct {
	pid   int
	late  chan struct{} // closed when it had its time, and has not answered
	ended chan struct{}
	err   error // what it found, once ended is closed
}

// Read returns when a store has answered. ErrHangs is wrapped where the store had so much time for it as limit says, which its
// first caller sets; who gives up before learns nothing about the store.
func (t *Trials) Read(ctx context.Context, path string, limit time.Duration) error {
	r, joined, err := t.start(path, limit)
	if err != nil {
		return fmt.Errorf("try store %s: %w", path, err)
	}
	select {
	case <-r.ended:
	case <-r.late:
		return fmt.Errorf("try store %s: %w a small read, which process %d waits for", path, ErrHangs, r.pid)
	case <-ctx.Done():
		return fmt.Errorf("try store %s: it has not answered yet: %w", path, ctx.Err())
	}
	if joined && r.err != nil { // it tells of a time that is over
		return t.Read(ctx, path, limit)
	}
	return r.err
}

// start starts a trial, or joins the one that goes on.
func (t *Trials) start(path string, limit time.Duration) (r *running, joined bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.running[path]; r != nil {
		return r, true, nil
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{childName, path}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return nil, false, err
	}
	r = &running{pid: cmd.Process.Pid, late: make(chan struct{}), ended: make(chan struct{})}
	if t.running == nil {
		t.running = map[string]*running{}
	}
	t.running[path] = r
	overdue := time.AfterFunc(limit, func() {
		close(r.late)
		_ = cmd.Process.Kill() // fails only where it has ended
	})
	go func() {
		err := cmd.Wait()
		switch {
		case !overdue.Stop():
			r.err = fmt.Errorf("try store %s: %w a small read within %v", path, ErrHangs, limit)
		case err != nil:
			r.err = fmt.Errorf("try store %s: %w: %s", path, err, said.String())
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.running, path)
		close(r.ended)
	}()
	return r, false, nil
}
