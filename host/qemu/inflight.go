package qemu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// graphLockMajor is the first QEMU in which a change of the graph of block nodes waits for the requests of all disks.
	graphLockMajor = 8
	// requestLimit is for how long a request may be in flight before its disk counts as one that hangs.
	requestLimit = 10 * time.Second
	// requestAgain is the pause between two looks at the requests in flight.
	requestAgain = 10 * time.Millisecond
)

// ErrDiskHangs is the refusal to have any disk come, grow or go while a request of one disk does not end: QEMU, and with it the guest,
// would stand still until it does. The error is a *HangsError too.
var ErrDiskHangs = errors.New("a request of a disk does not end")

// HangsError says whose request does not end.
type HangsError struct {
	// ID and Path are of the disk that hangs, which need not be the one that the call is about.
	ID, Path string
	// For is how long the request was seen in flight, at least.
	For time.Duration
	// QEMU is its version.
	QEMU string
}

// Error names the disk and the way out.
func (e *HangsError) Error() string {
	return fmt.Sprintf("disk %s (%s) has had a request in flight for %v, and QEMU %s would stand still until it ends, with its guest, if a disk came, grew or went now: have that store answer, or stop the VM",
		e.ID, e.Path, e.For.Round(time.Second), e.QEMU)
}

// Is has errors.Is know it as ErrDiskHangs.
func (e *HangsError) Is(target error) bool { return target == ErrDiskHangs }

// HangingDisk returns the id of the disk that hangs.
func (e *HangsError) HangingDisk() string { return e.ID }

// changesGraph are the commands that change the graph of block nodes, at once or when the guest has obeyed. block_resize puts a node
// above the disk's for a moment (qmp_block_resize in blockdev.c).
var changesGraph = map[string]bool{
	"blockdev-add": true, "blockdev-del": true, "blockdev-reopen": true, "block_resize": true, "device_add": true, "device_del": true,
}

// request is one that a thread of QEMU's waits for. QEMU has stores read, written and flushed by the threads of a pool, a request
// each (util/thread-pool.c), in system calls whose first argument is the store's descriptor.
type request struct {
	thread   string // its number
	call     string // the system call with its arguments (proc_pid_syscall(5))
	switches string // how often the thread has slept: as long as it is the same, the thread waits for the same thing
}

// requestTable knows since when requests are in flight. The zero value is ready.
type requestTable struct {
	mu    sync.Mutex
	since map[request]time.Time
}

// saw takes in which requests are in flight, and returns since when each was seen, at least.
func (t *requestTable) saw(now map[request]*disk) map[request]time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	since := make(map[request]time.Time, len(now))
	for r := range now {
		since[r] = time.Now()
		if before, ok := t.since[r]; ok {
			since[r] = before
		}
	}
	t.since = since
	return since
}

// awaitRequests waits until the requests in flight have ended, where QEMU would wait for them in its main loop. A *HangsError says
// that one does not end. Requests that come meanwhile are QEMU's to hold back.
func (vm *VM) awaitRequests(ctx context.Context) error {
	if vm.major < graphLockMajor {
		return nil
	}
	again := time.NewTicker(requestAgain)
	defer again.Stop()
	var left map[request]*disk
	for {
		now, err := vm.inFlight()
		if err != nil {
			vm.blind.Do(func() {
				vm.log.WithError(err).Warn("QEMU's requests in flight cannot be looked at: while one hangs, a disk that comes, grows or goes stops the VM")
			})
			return nil
		}
		if left == nil {
			left = maps.Clone(now)
		}
		since := vm.requests.saw(now)
		for r, d := range left {
			if now[r] == nil {
				delete(left, r)
			} else if seen := time.Since(since[r]); seen >= requestLimit {
				return &HangsError{ID: d.ID, Path: d.Path, For: seen, QEMU: vm.Version()}
			}
		}
		if len(left) == 0 {
			return nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return stillInFlight(left, ctx.Err())
		}
	}
}

// stillInFlight is the failure of who gives up before it is known whether a request hangs.
func stillInFlight(left map[request]*disk, err error) error {
	for _, d := range left {
		err = fmt.Errorf("QEMU would wait for a request of disk %s (%s) that has not ended: %w", d.ID, d.Path, err)
		break
	}
	return err
}

// inFlight returns the requests that threads of QEMU's wait for now. It asks no store anything.
func (vm *VM) inFlight() (map[request]*disk, error) {
	process := fmt.Sprintf("/proc/%d", vm.qemu.cmd.Process.Pid)
	stores := make(map[string]*disk) // by where their descriptors lead
	for _, d := range vm.disks.all() {
		if leads, err := os.Readlink(d.store.Handle()); err == nil { // else it was closed meanwhile
			stores[leads] = d
		}
	}
	threads, err := os.ReadDir(filepath.Join(process, "task"))
	if err != nil {
		return nil, err
	}
	found := make(map[request]*disk)
	for _, thread := range threads {
		dir := filepath.Join(process, "task", thread.Name())
		call, err := os.ReadFile(filepath.Join(dir, "syscall"))
		if errors.Is(err, os.ErrPermission) {
			return nil, err
		}
		descriptor, ok := firstArgument(string(call))
		if err != nil || !ok { // the thread has ended, or waits for nothing
			continue
		}
		leads, err := os.Readlink(filepath.Join(process, "fd", strconv.FormatUint(descriptor, 10)))
		if d := stores[leads]; err == nil && d != nil {
			found[request{thread.Name(), string(call), sleeps(filepath.Join(dir, "status"))}] = d
		}
	}
	return found, nil
}

// firstArgument reads the first argument of a thread's system call: its number in decimal, and six arguments in hexadecimal. A thread
// that runs has none, and one that waits elsewhere the number -1.
func firstArgument(line string) (uint64, bool) {
	fields := strings.Fields(line)
	if len(fields) < 2 || fields[0] == "-1" {
		return 0, false
	}
	argument, err := strconv.ParseUint(strings.TrimPrefix(fields[1], "0x"), 16, 64)
	return argument, err == nil
}

// sleeps reads from a thread's status file how often it has slept by itself; "" where there is none.
func sleeps(file string) string {
	text, _ := os.ReadFile(file) // the thread has ended
	_, behind, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
	count, _, _ := strings.Cut(behind, "\n")
	return strings.TrimSpace(count)
}
