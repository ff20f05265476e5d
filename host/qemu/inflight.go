package qemu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// graphLockMajor is the first major version of QEMU in which changing the graph of block nodes
	// waits for the requests of all disks. Earlier ones wait for those of the disk that changes.
	graphLockMajor = 8
	// requestLimit is how long a request may be in flight before its disk counts as hanging.
	requestLimit = 10 * time.Second
	// slowRequest is how long a request is in flight that is waited for too, though it began during
	// a wait.
	slowRequest = 100 * time.Millisecond
	// requestAgain is the pause between two checks of the requests in flight.
	requestAgain = 10 * time.Millisecond
	// lookGap is the longest time between two looks after which they still say something about each
	// other.
	lookGap = 50 * time.Millisecond
)

// ErrDiskHangs is the refusal to grow or detach a disk while a request of it does not end, or, with
// a QEMU that has a graph lock, to attach, grow or detach any disk meanwhile: QEMU, and the guest
// with it, would be blocked until the request ends. The error is also a *HangsError.
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
	return fmt.Sprintf("disk %s (%s) has had a request in flight for %v, and QEMU %s would stand still, with its guest, until it ends: have that store answer, or stop the VM",
		e.ID, e.Path, e.For.Round(time.Second), e.QEMU)
}

// Is makes errors.Is match ErrDiskHangs.
func (e *HangsError) Is(target error) bool { return target == ErrDiskHangs }

// HangingDisk returns the id of the disk that hangs.
func (e *HangsError) HangingDisk() string { return e.ID }

// changesGraph lists the commands that change the graph of block nodes, at once or after the guest
// has obeyed. block_resize briefly puts a node above the disk's node (qmp_block_resize in
// blockdev.c).
var changesGraph = map[string]bool{
	"blockdev-add": true, "blockdev-del": true, "blockdev-reopen": true, "block_resize": true, "device_add": true, "device_del": true,
}

// request identifies a disk request: a thread of QEMU's in a system call. QEMU reads, writes and
// flushes stores with a thread pool, one request per thread (util/thread-pool.c). The first
// argument of the thread's system call is the store's descriptor.
type request struct {
	thread string // the thread's number
	call   string // the system call with its arguments (proc_pid_syscall(5))
}

// sight is what one look shows of a request.
type sight struct {
	disk *disk
	// ended counts the reads and writes that the thread has ended; "" if the call is neither, or
	// the kernel does not count.
	ended string
	slept uint64 // how often the thread has slept
}

// look is what QEMU's threads do at one moment.
type look struct {
	waiting map[request]sight
	seen    map[string]bool // the numbers of the threads that wait somewhere, or have ended; what a running thread does cannot be seen
}

// continues reports whether a thread that was seen in the same call some time ago is still at the
// same request. In a request that hangs, a thread may wake and sleep again: a writer that the
// kernel holds back does so up to 100 times a second (balance_dirty_pages), and whoever waits for a
// block device every hung_task_timeout_secs/2 (submit_bio_wait). A thread that has begun another
// request with the same arguments, such as the next flush, has slept at least twice meanwhile: for
// lack of work, and in that request.
func (s sight) continues(before sight, ago time.Duration) bool {
	if s.ended != "" && before.ended != "" {
		return s.ended == before.ended
	}
	return s.slept == before.slept || ago < lookGap && s.slept == before.slept+1
}

// flight is a request in flight.
type flight struct {
	sight
	since, seen time.Time // the first and the last look that showed it
	unseen      time.Time // the first look behind them that did not show what its thread does
}

// requestTable records since when requests are in flight. The zero value is ready to use.
type requestTable struct {
	mu      sync.Mutex
	flights map[request]flight // replaced by each look, and not changed
}

// saw records a look, and returns the requests in flight. The caller holds mu. A request whose
// thread runs has not been seen to end: it stays until the thread has run for lookGap.
func (t *requestTable) saw(now look) map[request]flight {
	at := time.Now()
	flights := make(map[request]flight, len(now.waiting))
	for r, s := range now.waiting {
		f := flight{sight: s, since: at, seen: at}
		if before, ok := t.flights[r]; ok && s.continues(before.sight, at.Sub(before.seen)) {
			f.since = before.since
		}
		flights[r] = f
	}
	for r, before := range t.flights {
		if now.seen[r.thread] {
			continue
		}
		if before.unseen.IsZero() {
			before.unseen = at
		}
		if at.Sub(before.unseen) < lookGap {
			flights[r] = before
		}
	}
	t.flights = flights
	return flights
}

// awaited is a request for which a caller waits.
type awaited struct {
	flight
	first bool // the caller's first look showed it
}

// wait is one caller's wait for requests to end: those of its first look, and those that begin
// while one of these is left and take longer than slowRequest, since one of them may begin to hang.
// It lasts at most twice as long as requestLimit. The zero value is ready to use.
type wait struct {
	left map[request]awaited // nil before the first look
}

// saw records the requests in flight. It returns one that hangs, nil if there is no such request.
func (w *wait) saw(now map[request]flight) (hanging *flight) {
	begins, joins := w.left == nil, false
	for _, a := range w.left {
		joins = joins || a.first
	}
	left := make(map[request]awaited)
	for r, f := range now {
		before, waits := w.left[r]
		waits = waits && before.since.Equal(f.since)
		inFlight := time.Since(f.since)
		if !begins && !waits && !(joins && inFlight >= slowRequest) {
			continue
		}
		left[r] = awaited{f, begins || waits && before.first}
		if inFlight >= requestLimit {
			hanging = &f
		}
	}
	w.left = left
	return hanging
}

// awaitRequests waits until the current requests have ended for which QEMU would wait in its main
// loop if disk d changed now; d is nil if the disk is new. It fails with a *HangsError if a request
// does not end. It ignores requests that start later and end soon: QEMU holds those back itself.
func (vm *VM) awaitRequests(ctx context.Context, d *disk) error {
	if d == nil && vm.major < graphLockMajor {
		return nil
	}
	again := time.NewTicker(requestAgain)
	defer again.Stop()
	var w wait
	for {
		now, err := vm.look()
		if err != nil {
			vm.isBlind(err)
			return nil
		}
		if hangs := w.saw(vm.blocking(now, d)); hangs != nil {
			return &HangsError{ID: hangs.disk.ID, Path: hangs.disk.Path, For: time.Since(hangs.since), QEMU: vm.Version()}
		}
		if len(w.left) == 0 {
			return nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return stillInFlight(w.left, ctx.Err())
		}
	}
}

// blocking returns those requests in flight for which QEMU waits when disk d changes. Every QEMU
// waits for those of the disk itself (bdrv_drained_begin in block/io.c).
func (vm *VM) blocking(now map[request]flight, d *disk) map[request]flight {
	if vm.major >= graphLockMajor {
		return now
	}
	own := maps.Clone(now)
	maps.DeleteFunc(own, func(_ request, f flight) bool { return f.disk != d })
	return own
}

// isBlind warns once that the requests in flight cannot be seen, unless that is because QEMU has
// ended.
func (vm *VM) isBlind(err error) {
	if !vm.qemu.running() || errors.Is(err, os.ErrNotExist) {
		return
	}
	vm.blind.Do(func() {
		vm.log.WithError(err).Warn("QEMU's requests in flight cannot be examined: if one hangs, attaching, growing or detaching a disk stops the VM")
	})
}

// stillInFlight returns the error of a caller whose context ended before it was known whether a
// request hangs.
func stillInFlight(left map[request]awaited, err error) error {
	for _, a := range left {
		err = fmt.Errorf("QEMU would wait for a request of disk %s (%s) that has not ended: %w", a.disk.ID, a.disk.Path, err)
		break
	}
	return err
}

// look returns the requests in flight. Looks are recorded in the order in which they are made.
func (vm *VM) look() (map[request]flight, error) {
	vm.requests.mu.Lock()
	defer vm.requests.mu.Unlock()
	now, err := vm.lookAtThreads()
	if err != nil {
		return nil, err
	}
	return vm.requests.saw(now), nil
}

// lookAtThreads returns the requests for which QEMU's threads wait now. It reads only /proc and
// accesses no store. The caller holds requests.mu.
func (vm *VM) lookAtThreads() (look, error) {
	process := fmt.Sprintf("/proc/%d", vm.qemu.cmd.Process.Pid)
	stores := make(map[string]*disk) // by the target of their descriptor's link
	for _, d := range vm.disks.all() {
		if leads, err := os.Readlink(d.store.Handle()); err == nil { // an error means that the store was closed meanwhile
			stores[leads] = d
		}
	}
	listed, err := os.ReadDir(filepath.Join(process, "task"))
	if err != nil {
		return look{}, err
	}
	threads := make(map[string]bool)
	for _, entry := range listed {
		threads[entry.Name()] = true
	}
	for r := range vm.requests.flights { // the kernel's list may be short when a thread ends meanwhile
		threads[r.thread] = true
	}
	now := look{make(map[request]sight), make(map[string]bool)}
	for thread := range threads {
		if err := now.lookAt(process, thread, stores); err != nil {
			return look{}, err
		}
	}
	return now, nil
}

// lookAt adds what a thread does. A store is found by the target of its descriptor's link.
func (l look) lookAt(process, thread string, stores map[string]*disk) error {
	dir := filepath.Join(process, "task", thread)
	text, err := os.ReadFile(filepath.Join(dir, "syscall"))
	call := strings.TrimSpace(string(text))
	descriptor, waits := firstArgument(call)
	switch {
	case errors.Is(err, os.ErrPermission):
		return err
	case errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH): // the thread has ended
		l.seen[thread] = true
		return nil
	case err != nil || call == "running":
		return nil
	case !waits:
		l.seen[thread] = true
		return nil
	}
	leads, err := os.Readlink(filepath.Join(process, "fd", strconv.FormatUint(descriptor, 10)))
	l.seen[thread] = err == nil || errors.Is(err, os.ErrNotExist) // an argument may be no descriptor
	if d := stores[leads]; err == nil && d != nil {
		slept, _ := strconv.ParseUint(count(filepath.Join(dir, "status"), "voluntary_ctxt_switches"), 10, 64)
		l.waiting[request{thread, call}] = sight{d, endedBy(dir, call), slept}
	}
	return nil
}

// firstArgument parses the first argument of a thread's system call. The line has the call's number
// in decimal and six arguments in hexadecimal; a running thread has no arguments, and a thread that
// waits outside a system call has the number -1.
func firstArgument(line string) (uint64, bool) {
	fields := strings.Fields(line)
	if len(fields) < 2 || fields[0] == "-1" {
		return 0, false
	}
	argument, err := strconv.ParseUint(strings.TrimPrefix(fields[1], "0x"), 16, 64)
	return argument, err == nil
}

// counted lists the system calls by which QEMU reads and writes a store. The kernel counts them
// when they end.
var counted = []int{
	unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_PREADV, unix.SYS_PWRITEV, unix.SYS_PREADV2, unix.SYS_PWRITEV2,
}

// endedBy returns how many reads and writes a thread has ended (proc_pid_io(5)), if the thread is
// in one; else "".
func endedBy(thread, call string) string {
	number, _, _ := strings.Cut(call, " ")
	if n, err := strconv.Atoi(number); err != nil || !slices.Contains(counted, n) {
		return ""
	}
	file := filepath.Join(thread, "io")
	reads, writes := count(file, "syscr"), count(file, "syscw")
	if reads == "" || writes == "" {
		return ""
	}
	return reads + " " + writes
}

// count returns the value of a key in a file of a thread's in /proc; "" if the file or the key is
// missing.
func count(file, key string) string {
	text, _ := os.ReadFile(file) // an error means that the thread has ended
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(line, ":"); name == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
