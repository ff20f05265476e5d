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
	// graphLockMajor is the first major version of QEMU in which changing the graph of block nodes waits for the requests of
	// all disks.
	graphLockMajor = 8
	// requestLimit is how long a request may be in flight before its disk counts as hanging.
	requestLimit = 10 * time.Second
	// requestAgain is the pause between two checks of the requests in flight.
	requestAgain = 10 * time.Millisecond
)

// ErrDiskHangs is the refusal to attach, grow or detach any disk while a request of one disk does not end: QEMU, and the
// guest with it, would be blocked until the request ends. The error is also a *HangsError.
var ErrDiskHangs = errors.New("a request of a disk does not end")

// HangsError names the disk whose request does not end.
type HangsError struct {
	// ID and Path identify the disk that hangs. The failed call may have been for another disk.
	ID, Path string
	// For is the least time that the request has been in flight: the time since it was first seen.
	For time.Duration
	// QEMU is QEMU's version.
	QEMU string
}

// Error names the disk and the remedy.
func (e *HangsError) Error() string {
	return fmt.Sprintf("disk %s (%s) has had a request in flight for %v, and QEMU %s would stand still until it ends, with its guest, if a disk came, grew or went now: have that store answer, or stop the VM",
		e.ID, e.Path, e.For.Round(time.Second), e.QEMU)
}

// Is makes errors.Is match ErrDiskHangs.
func (e *HangsError) Is(target error) bool { return target == ErrDiskHangs }

// HangingDisk returns the id of the disk that hangs.
func (e *HangsError) HangingDisk() string { return e.ID }

// changesGraph lists the commands that change the graph of block nodes, at once or after the guest has obeyed. block_resize
// briefly puts a node above the disk's node (qmp_block_resize in blockdev.c).
var changesGraph = map[string]bool{
	"blockdev-add": true, "blockdev-del": true, "blockdev-reopen": true, "block_resize": true, "device_add": true, "device_del": true,
}

// request is a disk request for which one of QEMU's threads waits. QEMU reads, writes and flushes stores with a thread
// pool, one request per thread (util/thread-pool.c). The first argument of the thread's system call is the store's
// descriptor.
type request struct {
	thread   string // the thread's number
	call     string // the system call with its arguments (proc_pid_syscall(5))
	switches string // how often the thread has slept; while the count is unchanged, the thread is in the same wait
}

// requestTable records since when requests are in flight. The zero value is ready to use.
type requestTable struct {
	mu    sync.Mutex
	since map[request]time.Time
}

// saw records the requests that are in flight now, and returns when each was first seen.
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

// awaitRequests waits until the current requests have ended, if this QEMU would otherwise wait for them in its main loop.
// It fails with a *HangsError if a request does not end. It ignores requests that start later: QEMU holds those back itself.
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

// stillInFlight returns the error of a caller whose context ended before it was known whether a request hangs.
func stillInFlight(left map[request]*disk, err error) error {
	for _, d := range left {
		err = fmt.Errorf("QEMU would wait for a request of disk %s (%s) that has not ended: %w", d.ID, d.Path, err)
		break
	}
	return err
}

// inFlight returns the requests for which QEMU's threads wait now. It reads only /proc and accesses no store.
func (vm *VM) inFlight() (map[request]*disk, error) {
	process := fmt.Sprintf("/proc/%d", vm.qemu.cmd.Process.Pid)
	stores := make(map[string]*disk) // by the target of their descriptor's link
	for _, d := range vm.disks.all() {
		if leads, err := os.Readlink(d.store.Handle()); err == nil { // an error means that the store was closed meanwhile
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
		if err != nil || !ok { // the thread has ended, or is not waiting
			continue
		}
		leads, err := os.Readlink(filepath.Join(process, "fd", strconv.FormatUint(descriptor, 10)))
		if d := stores[leads]; err == nil && d != nil {
			found[request{thread.Name(), string(call), sleeps(filepath.Join(dir, "status"))}] = d
		}
	}
	return found, nil
}

// firstArgument parses the first argument of a thread's system call. The line has the call's number in decimal and six
// arguments in hexadecimal; a running thread has no arguments, and a thread that waits outside a system call has the
// number -1.
func firstArgument(line string) (uint64, bool) {
	fields := strings.Fields(line)
	if len(fields) < 2 || fields[0] == "-1" {
		return 0, false
	}
	argument, err := strconv.ParseUint(strings.TrimPrefix(fields[1], "0x"), 16, 64)
	return argument, err == nil
}

// sleeps reads the thread's number of voluntary context switches from its status file; "" if the file is missing.
func sleeps(file string) string {
	text, _ := os.ReadFile(file) // an error means that the thread has ended
	_, behind, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
	count, _, _ := strings.Cut(behind, "\n")
	return strings.TrimSpace(count)
}
