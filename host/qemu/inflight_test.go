package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/host/trial"
	"github.com/directvol/directvol/host/trial/trialtest"
)

// hangingStore is a store that can be made to hang, with a request that then hangs.
type hangingStore struct {
	path          string
	hang, recover func()
	request       string // in the syntax of QEMU's qemu-io
}

// hangingStores returns three stores: one answers reads while its writes hang, one holds back
// whoever writes more than it takes, and the last one's server stops completely.
func hangingStores(t *testing.T) map[string]hangingStore {
	must(t, trial.Prepare(limited(t))) // as a sandbox does: beside a store that hangs it could not start
	path, freeze, thaw := frozen(t)
	served, stop, answer := trialtest.Serve(t)
	return map[string]hangingStore{
		"writes": {path, freeze, thaw, "aio_write 0 4k"}, "held-back": holdingBack(t), "all": {served, stop, answer, "aio_read 0 4k"},
	}
}

// holdingBack returns a block device that does not write while it hangs. The kernel holds its
// writers back beyond 1 MiB: it lets them sleep, 200 ms at most, again and again
// (balance_dirty_pages).
func holdingBack(t *testing.T) hangingStore {
	path, freeze, thaw := frozen(t)
	must(t, os.Truncate(path, 16*mib))
	device := loopDevice(t, path)
	var st unix.Stat_t
	must(t, unix.Stat(device, &st))
	set := func(name, value string) error {
		file := fmt.Sprintf("/sys/class/bdi/%d:%d/%s", unix.Major(st.Rdev), unix.Minor(st.Rdev), name)
		return os.WriteFile(file, []byte(value), 0o600)
	}
	if err := errors.Join(set("strict_limit", "1"), set("max_bytes", "1048576")); err != nil {
		t.Skipf("no limit for one device's writers (run with Linux 6.2 or later): %v", err)
	}
	return hangingStore{device, freeze, func() {
		thaw()
		must(t, errors.Join(set("strict_limit", "0"), set("max_ratio", "100")))
	}, "aio_write 0 12M"}
}

// begins makes QEMU start a request of a disk without waiting for its end, and returns when a
// thread of QEMU executes the request. On a busy machine QEMU answers the command before that.
func begins(t *testing.T, vm *VM, id, request string) {
	t.Helper()
	ctx := limited(t)
	must(t, vm.execute(ctx, "human-monitor-command", map[string]string{
		"command-line": `qemu-io -d /machine/peripheral/` + deviceOf(vm, id) + `/virtio-backend "` + request + `"`,
	}, nil))
	for {
		now, err := vm.look()
		must(t, err)
		if len(now) > 0 {
			return
		}
		must(t, ctx.Err())
		runtime.Gosched()
	}
}

// withHangingWrite returns a VM with a disk "dead", and with a write to it that hangs until thaw.
func withHangingWrite(t *testing.T) (vm *VM, thaw func()) {
	t.Helper()
	path, freeze, thaw := frozen(t)
	vm = realVM(t)
	t.Cleanup(thaw) // runs before the VM is killed
	_, err := vm.AttachDisk(limited(t), Disk{ID: "dead", Path: path})
	must(t, err)
	freeze()
	begins(t, vm, "dead", "aio_write 0 4k")
	return vm, thaw
}

// haveHungFor makes all requests in flight look as if they had been first seen d ago.
func (t *requestTable) haveHungFor(d time.Duration) (requests int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	flights := make(map[request]flight)
	for r, f := range t.flights {
		f.since = time.Now().Add(-d)
		flights[r] = f
	}
	t.flights = flights
	return len(flights)
}

// QEMU 8 and later would block together with its guest. The installed QEMU may be older: the test
// makes the VM treat any QEMU as version 8.
func TestRealQEMUIsAskedForNothingThatWouldHaveItWaitForADiskThatHangs(t *testing.T) {
	stores := hangingStores(t)
	vm := realVM(t)
	vm.major = graphLockMajor
	other := Disk{ID: "other", Path: image(t, mib)}
	_, err := vm.AttachDisk(limited(t), other)
	must(t, err)
	size := uint64(mib)
	for name, store := range stores {
		size *= 2
		t.Cleanup(store.recover) // runs before the VM is killed
		_, err := vm.AttachDisk(limited(t), Disk{ID: name, Path: store.path})
		must(t, err)
		must(t, vm.awaitRequests(limited(t), nil))
		store.hang()
		begins(t, vm, name, store.request)
		third := Disk{ID: "third", Path: image(t, mib)}
		calls := map[string]func(context.Context) error{
			"attach":        func(ctx context.Context) error { _, err := vm.AttachDisk(ctx, third); return err },
			"growth":        func(ctx context.Context) error { return vm.ResizeDisk(ctx, "other", size) },
			"detach":        func(ctx context.Context) error { return vm.DetachDisk(ctx, "other") },
			"of a sandbox":  func(ctx context.Context) error { return Machine{vm}.Answers(ctx, "other") },
			"its own store": func(ctx context.Context) error { return Machine{vm}.Answers(ctx, name) },
		}
		for what, call := range calls {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			err := call(ctx)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrDiskHangs) {
				t.Errorf("%s, %s: before it is known to hang\nwant %v\ngot  %v", name, what, context.DeadlineExceeded, err)
			}
		}
		if requests := vm.requests.haveHungFor(requestLimit); requests != 1 {
			t.Errorf("%s: want 1 request in flight\ngot  %d", name, requests)
		}
		delete(calls, "its own store") // for the second store, the trial reports the hang
		for what, call := range calls {
			err := call(limited(t))
			hangs, ok := errors.AsType[*HangsError](err)
			if !ok || hangs.ID != name || !strings.Contains(hangs.Error(), store.path) || !errors.Is(typed(hangs), sandbox.ErrStoreHangs) {
				t.Errorf("%s, %s:\nwant disk %s (%s) named, and %v\ngot  %v", name, what, name, store.path, ErrDiskHangs, err)
			}
		}
		if _, there := vm.Disk("third"); there {
			t.Errorf("%s: an attach that was refused has left something", name)
		}
		if err := typed(calls["detach"](limited(t))); !errors.Is(err, sandbox.ErrNotAsked) || vm.disks.find("other").leaving() {
			t.Errorf("%s: a detach was refused:\nwant its disk not asked for, and not leaving\ngot  %v", name, err)
		}
		unsentLeavesNoDoubt(t, vm, vm.disks.find("other"))
		store.recover()
		for errors.Is(vm.awaitRequests(limited(t), nil), ErrDiskHangs) { // takes a moment
			runtime.Gosched()
		}
		must(t, vm.ResizeDisk(limited(t), "other", size))
		must(t, vm.takeAwayNow(t, name))
	}
}

// A thread that wakes and sleeps again in a request that hangs has ended nothing.
func TestOnlyARequestThatWasSeenToEndHasEnded(t *testing.T) {
	d, write, flush := &disk{}, request{"7", "18 0x9 0x1"}, request{"7", "75 0x9"}
	at := func(r request, ended string, slept uint64) look {
		return look{map[request]sight{r: {d, ended, slept}}, map[string]bool{"7": true}}
	}
	running, elsewhere := look{}, look{seen: map[string]bool{"7": true}}
	for name, c := range map[string]struct {
		first, then look
		after       time.Duration
		ends        bool
	}{
		"a write that sleeps":                 {at(write, "1 5", 8), at(write, "1 5", 8), time.Hour, false},
		"a write that has woken":              {at(write, "1 5", 8), at(write, "1 5", 9), requestAgain, false},
		"a write that has woken often":        {at(write, "1 5", 8), at(write, "1 5", 900), time.Hour, false},
		"the same write again":                {at(write, "1 5", 8), at(write, "1 6", 10), requestAgain, true},
		"a flush that sleeps":                 {at(flush, "", 8), at(flush, "", 8), time.Hour, false},
		"a flush that has woken":              {at(flush, "", 8), at(flush, "", 9), requestAgain, false},
		"a flush that has woken at some time": {at(flush, "", 8), at(flush, "", 9), time.Hour, true},
		"the next flush":                      {at(flush, "", 8), at(flush, "", 10), requestAgain, true},
		"another request":                     {at(write, "1 5", 8), at(flush, "", 8), requestAgain, true},
		"a thread that has just woken":        {at(write, "1 5", 8), running, requestAgain, false},
		"a thread that wakes some time later": {at(write, "1 5", 8), running, time.Hour, false},
		"a thread that waits elsewhere":       {at(write, "1 5", 8), elsewhere, requestAgain, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var table requestTable
				var w wait
				w.saw(table.saw(c.first))
				time.Sleep(c.after)
				hanging := w.saw(table.saw(c.then))
				if ended := len(w.left) == 0; ended != c.ends {
					t.Errorf("want it ended: %v\ngot  %v", c.ends, ended)
				}
				if hangs := hanging != nil; hangs != (!c.ends && c.after >= requestLimit) {
					t.Errorf("after %v it is said to hang: %v", c.after, hangs)
				}
			})
		})
	}
}

// The system call of a running thread cannot be seen. For a moment it may still be the request.
func TestRequestOfAThreadThatGoesOnRunningHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var table requestTable
		r := request{"7", "18 0x9 0x1"}
		table.saw(look{map[request]sight{r: {&disk{}, "1 5", 8}}, map[string]bool{"7": true}})
		time.Sleep(time.Hour)
		for ran := time.Duration(0); ran <= lookGap; ran += requestAgain {
			if left := len(table.saw(look{})) > 0; left != (ran < lookGap) {
				t.Errorf("after %v of running, in flight: %v", ran, left)
			}
			time.Sleep(requestAgain)
		}
	})
}

// A request may begin to hang while another one is waited for. Those that come later are not waited
// for, so that the wait ends beside a disk that is always slow.
func TestRequestThatBeginsToHangDuringTheWaitIsSeen(t *testing.T) {
	type span struct{ begins, ends time.Duration }
	const second, never = time.Second, time.Hour
	for name, c := range map[string]struct {
		requests []span
		ends     time.Duration
		hangs    bool
	}{
		"no request":               {nil, 0, false},
		"one that ends":            {[]span{{0, second}}, second, false},
		"one that hangs":           {[]span{{0, never}}, requestLimit, true},
		"a quick one behind":       {[]span{{0, second}, {second - slowRequest/2, never}}, second, false},
		"a slow one behind":        {[]span{{0, second}, {second / 2, 3 * second}}, 3 * second, false},
		"one behind that hangs":    {[]span{{0, second}, {second / 2, never}}, second/2 + requestLimit, true},
		"slow ones, one by one":    {[]span{{0, second}, {second / 2, 2 * second}, {3 * second / 2, 4 * second}, {2 * second, never}}, 2 * second, false},
		"one before the first end": {[]span{{0, 9 * second}, {8 * second, never}}, 8*second + requestLimit, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var table requestTable
				var w wait
				began := time.Now()
				for {
					now := look{make(map[request]sight), make(map[string]bool)}
					for i, r := range c.requests {
						now.seen[strconv.Itoa(i)] = true
						if at := time.Since(began); r.begins <= at && at < r.ends {
							now.waiting[request{strconv.Itoa(i), "18 0x9"}] = sight{&disk{}, "0 0", 1}
						}
					}
					hanging := w.saw(table.saw(now))
					if hanging == nil && len(w.left) > 0 {
						time.Sleep(requestAgain)
						continue
					}
					if took := time.Since(began); took != c.ends || (hanging != nil) != c.hangs {
						t.Errorf("want the end after %v, hanging: %v\ngot it after %v, hanging: %v", c.ends, c.hangs, took, hanging != nil)
					}
					return
				}
			})
		})
	}
}

// unsentLeavesNoDoubt checks that a request that is not sent leaves no doubt to which one the
// guest's refusal belongs.
func unsentLeavesNoDoubt(t *testing.T, vm *VM, d *disk) {
	t.Helper()
	d.request()
	d.answer(true)
	if _, err := vm.requestAgain(limited(t), d); !errors.Is(err, ErrDiskHangs) {
		t.Errorf("ask again\nwant %v\ngot  %v", ErrDiskHangs, err)
	}
	refused := d.refusal()
	d.refuses(time.Now())
	select {
	case <-refused:
	default:
		t.Errorf("a request was not sent, and a refusal of the one before is in doubt")
		d.stays()
	}
}

// A store may answer reads while a write to it hangs: a filesystem that is frozen or full, a
// network disk that takes no more. Every QEMU waits for the writes of a disk that grows or goes.
func TestRealQEMUDoesNotStandStillForADiskWhoseWriteHangs(t *testing.T) {
	vm, thaw := withHangingWrite(t)
	calls := map[string]func(context.Context) error{
		"of a sandbox": func(ctx context.Context) error { return Machine{vm}.Answers(ctx, "dead") },
		"growth":       func(ctx context.Context) error { return vm.ResizeDisk(ctx, "dead", 2*mib) },
		"detach":       func(ctx context.Context) error { return vm.DetachDisk(ctx, "dead") },
	}
	vm.requests.haveHungFor(requestLimit)
	for what, call := range calls {
		if err := call(limited(t)); !errors.Is(err, ErrDiskHangs) {
			t.Errorf("%s\nwant %v\ngot  %v", what, ErrDiskHangs, err)
		}
	}
	must(t, vm.send(limited(t), "query-status", nil, nil))
	if vm.disks.find("dead").leaving() {
		t.Error("a detach was refused, and its disk is said to be leaving")
	}
	thaw()
	for errors.Is(vm.awaitRequests(limited(t), vm.disks.find("dead")), ErrDiskHangs) { // takes a moment
		runtime.Gosched()
	}
	must(t, vm.ResizeDisk(limited(t), "dead", 2*mib))
	must(t, vm.takeAwayNow(t, "dead"))
}

// takeAwayNow detaches a disk from a machine without a guest. The machine runs from then on,
// because a paused one keeps stores open.
func (vm *VM) takeAwayNow(t *testing.T, id string) error {
	t.Helper()
	resetGuest(t, vm)
	must(t, vm.send(limited(t), "cont", nil, nil))
	detached := make(chan error, 1)
	go func() { detached <- vm.DetachDisk(limited(t), id) }()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case err := <-detached:
			return err
		case <-again.C:
			resetGuest(t, vm)
		}
	}
}

// This is why the requests in flight are waited for. If a later QEMU passes no more, it need not be
// spared the command.
func TestRealQEMUWithAGraphLockStandsStillBesideADiskThatHangs(t *testing.T) {
	vm, thaw := withHangingWrite(t)
	if vm.major < graphLockMajor {
		t.Skipf("QEMU %s has none (put a QEMU %d or later first in PATH)", vm.Version(), graphLockMajor)
	}
	asks := func(command string, arguments any) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return vm.send(ctx, command, arguments, nil)
	}
	must(t, asks("query-status", nil))
	if err := asks("blockdev-add", map[string]any{"driver": "raw", "node-name": "other", "file": map[string]string{"driver": "null-co"}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a node that comes\nwant %v\ngot  %v", context.DeadlineExceeded, err)
	}
	if err := asks("query-status", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("whatever is asked then\nwant %v\ngot  %v", context.DeadlineExceeded, err)
	}
	thaw()
	now, err := vm.state(limited(t))
	if err != nil || !now.nodes["other"] {
		t.Errorf("when the disk answers, want the node\ngot  %v, %v", now.nodes, err)
	}
}

// Earlier QEMUs do not block, and get the command.
func TestRealQEMUWithoutAGraphLockGoesOn(t *testing.T) {
	vm, _ := withHangingWrite(t)
	if vm.major >= graphLockMajor {
		t.Skipf("QEMU %s has one (run it with Debian 12's)", vm.Version())
	}
	awaitState(t, vm.qemu, "D")
	_, err := vm.AttachDisk(limited(t), Disk{ID: "other", Path: image(t, mib)})
	must(t, err)
	must(t, vm.ResizeDisk(limited(t), "other", 2*mib))
}

// A QEMU that has ended has no requests: it is no reason to warn of a VM that may stop.
func TestNoWarningOfUnseenRequestsWhenQEMUHasEnded(t *testing.T) {
	vm, _ := fakeVM(t) // whose process has ended
	log, hook := test.NewNullLogger()
	vm.log, vm.major = logrus.NewEntry(log), graphLockMajor
	must(t, vm.awaitRequests(limited(t), nil))
	if said := hook.LastEntry(); said != nil {
		t.Errorf("want nothing said\ngot  %s", said.Message)
	}
	vm.isBlind(os.ErrPermission)
	vm.isBlind(os.ErrPermission)
	if said := len(hook.AllEntries()); said != 1 {
		t.Errorf("where it may not be looked at, want one warning\ngot  %d", said)
	}
}

func TestFirstArgumentOfASystemCallIsRead(t *testing.T) {
	for line, want := range map[string]uint64{
		"17 0x1d 0x7f00 0x1000 0x0 0x0 0x0 0x7ffd 0x7f12\n": 0x1d, "running\n": 0, "-1 0x7ffd 0x7f12\n": 0, "": 0, "17 zz": 0,
	} {
		if got, ok := firstArgument(line); got != want || ok != (want != 0) {
			t.Errorf("%q\nwant %#x\ngot  %#x, %v", line, want, got, ok)
		}
	}
}

// A detach tries the store once more after waiting for its guest, and so does the undoing of an
// attach.
func TestNodesOfAStoreThatHangsStay(t *testing.T) {
	for name, hangs := range map[string]error{"hangs": trial.ErrHangs, "untried": trial.ErrUntried} {
		vm, q := fakeVM(t)
		var found error
		vm.try = func(context.Context, *disk) error { return found }
		want := Disk{ID: "data", Path: image(t, mib)}
		_, err := vm.AttachDisk(limited(t), want)
		must(t, err)
		found = hangs
		if err := vm.DetachDisk(limited(t), "data"); !errors.Is(err, hangs) {
			t.Errorf("%s\nwant %v\ngot  %v", name, hangs, err)
		}
		q.with(func() {
			if !q.nodes[RawNode("data")] || !q.nodes[FileNode("data")] || len(q.sets) != 1 {
				t.Errorf("%s: of a store that hangs QEMU has left the nodes %v and the sets %v", name, q.nodes, q.sets)
			}
		})
		found = errors.New("it fails") // a failing store need not be kept
		must(t, vm.DetachDisk(limited(t), "data"))
		q.with(func() {
			if len(q.nodes) > 0 || len(q.sets) > 0 {
				t.Errorf("%s: left are the nodes %v and the sets %v", name, q.nodes, q.sets)
			}
		})
	}
}

func TestDetachWithoutADeadlineHasAMinute(t *testing.T) {
	vm, _ := fakeVM(t)
	_, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)})
	must(t, err)
	began := time.Now()
	vm.try = func(ctx context.Context, _ *disk) error {
		if ends, ok := ctx.Deadline(); !ok || ends.Before(began.Add(time.Minute)) || ends.After(time.Now().Add(time.Minute)) {
			t.Errorf("want a minute from the call on\ngot  %v after it", ends.Sub(began))
		}
		began = time.Time{}
		return nil
	}
	must(t, vm.DetachDisk(context.Background(), "data"))
	if !began.IsZero() {
		t.Error("the store was not tried")
	}
}
