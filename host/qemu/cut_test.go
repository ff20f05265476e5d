package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/directvol/directvol/host/qmp"
)

// script attaches a disk, grows it and detaches it.
func script(ctx context.Context, vm *VM, id, path string) error {
	if _, err := vm.AttachDisk(ctx, Disk{ID: id, Path: path}); err != nil {
		return err
	}
	if err := vm.ResizeDisk(ctx, id, 2*mib); err != nil {
		return err
	}
	return vm.DetachDisk(ctx, id)
}

// cutVM returns a VM on a fake QEMU behind a proxy that cuts a connection.
func cutVM(t *testing.T, which, direction, bytes int) (*VM, *fakeQEMU, *proxy) {
	t.Helper()
	q, path := listenFake(t)
	p, front := listenProxy(t, path)
	vm := vmOn(t, front)
	p.cutAt(which, direction, bytes)
	if which > 1 {
		p.cutAll()
	}
	return vm, q, p
}

// afterCut runs the script over a connection that is cut, and checks that the script does not
// notice.
func afterCut(t *testing.T, made *atomic.Int64, which, direction, bytes int) {
	vm, q, p := cutVM(t, which, direction, bytes)
	path := image(t, mib)
	if err := script(limited(t), vm, "data", path); err != nil {
		t.Errorf("attach, resize, detach: %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() > 2*mib {
		t.Errorf("the store: %v, %v", info, err)
	}
	q.with(func() {
		if len(q.nodes) != 0 || len(q.devices) != 0 || len(q.sets) != 0 {
			t.Errorf("left behind: nodes %v, devices %v, sets %v", q.nodes, q.devices, q.sets)
		}
	})
	if left := len(vm.disks.disks); left != 0 {
		t.Errorf("the VM has %d disks", left)
	}
	made.Add(int64(p.madeCuts()))
}

var directions = []string{toQEMU: "to QEMU", fromQEMU: "from QEMU"}

// The test cuts the connection after each byte that the script sends or receives.
func TestCutBehindEachByteChangesNothing(t *testing.T) { cutEverywhere(t, 1, 1) }

// The test also cuts the next connection: during its negotiation, during the queries for QEMU's
// state, and in the script.
func TestCutOfTheNextConnectionChangesNothing(t *testing.T) { cutEverywhere(t, 2, 3) }

// atOnce is how many scripts run at once. It is more than t.Parallel allows on a small machine,
// because each script mostly waits between two connections.
const atOnce = 16

// cutEverywhere first counts the bytes that the connection carries uncut, and then cuts it after
// every step-th byte.
func cutEverywhere(t *testing.T, which, step int) {
	vm, _, whole := cutVM(t, which, toQEMU, -1)
	if err := script(limited(t), vm, "data", image(t, mib)); err != nil {
		t.Fatal(err)
	}
	var made atomic.Int64
	tries := 0
	for direction, bytes := range whole.passed(which) {
		t.Run(directions[direction], func(t *testing.T) {
			var running sync.WaitGroup
			for first := range atOnce {
				running.Go(func() {
					for cut := first * step; cut < bytes; cut += atOnce * step {
						t.Run(fmt.Sprint(cut), func(t *testing.T) { afterCut(t, &made, which, direction, cut) })
					}
				})
			}
			running.Wait()
			tries += (bytes + step - 1) / step
		})
	}
	// Cuts in the last bytes may not happen, because a path or a number can be shorter than in the
	// uncut run.
	t.Logf("%d of %d connections were cut", made.Load(), tries)
	if got := made.Load(); got > int64(tries) || got < int64(tries)*9/10 {
		t.Errorf("connections that were cut:\nwant nearly all %d\ngot  %d", tries, got)
	}
}

// A detach that waits for a guest must neither block nor end the connection. Before, a limit of 5
// s, which equals askAgain, ended the only connection in 29 of 60 tries.
func TestDetachThatEndsWhileItAsksAgainKeepsTheConnection(t *testing.T) {
	vm, q := fakeVM(t)
	q.with(func() { q.guestLetsGo = false })
	if _, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)}); err != nil {
		t.Fatal(err)
	}
	for range 60 {
		// The limit expires at any point: before a command is sent, during it, or after it.
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.Int64N(int64(500*time.Microsecond))))
		err := vm.DetachDisk(ctx, "data")
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("want a deadline that is over\ngot  %v", err)
		}
	}
	if _, err := vm.state(limited(t)); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if want, got := uint64(1), vm.qmp.Connection(); got != want {
		t.Errorf("connection:\nwant %d, the first\ngot  %d", want, got)
	}
}

func TestDiskThatLeavesWithoutAListenerIsLogged(t *testing.T) {
	q, path := listenFake(t)
	p, front := listenProxy(t, path)
	vm := vmOn(t, front)
	for _, id := range []string{"stays", "leaves"} {
		if _, err := vm.AttachDisk(limited(t), Disk{ID: id, Path: image(t, mib)}); err != nil {
			t.Fatal(err)
		}
	}
	events := vm.QMP().Subscribe("DEVICE_DELETED")
	q.with(func() { delete(q.devices, deviceOf(vm, "leaves")) })
	p.cutAll()
	var data struct{ Device string }
	var event qmp.Event
	select {
	case event = <-events.Events():
	case <-limited(t).Done():
		t.Fatal("nothing was said of it")
	}
	if err := json.Unmarshal(event.Data, &data); err != nil || data.Device != deviceOf(vm, "leaves") {
		t.Errorf("missed event:\nwant %s\ngot  %s, %v", deviceOf(vm, "leaves"), event.Data, err)
	}
	if _, err := vm.state(limited(t)); err != nil {
		t.Error(err)
	}
	if left := len(events.Events()); left != 0 {
		t.Errorf("%d more events", left)
	}
}

// If nothing in QEMU's state shows whether a command was carried out, the command must not be sent
// twice.
func TestUndecidedOutcomeIsUnknown(t *testing.T) {
	q, path := listenFake(t)
	p, front := listenProxy(t, path)
	vm := vmOn(t, front)
	q.answerBy(func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		if command == "human-monitor-command" {
			p.cutAll()
		}
		return nil, nil, false
	})
	err := vm.execute(limited(t), "human-monitor-command", map[string]string{"command-line": "info"}, nil)
	if !errors.Is(err, qmp.ErrOutcomeUnknown) {
		t.Errorf("want %v\ngot  %v", qmp.ErrOutcomeUnknown, err)
	}
	sent := 0
	q.with(func() {
		for _, command := range q.commands {
			if command == "human-monitor-command" {
				sent++
			}
		}
	})
	if sent != 1 {
		t.Errorf("sent:\nwant once\ngot  %d times", sent)
	}
}

// FuzzState parses arbitrary answers to the queries for QEMU's state.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{"status": "running"}`), []byte(`[{"node-name": "a", "stats": {}}]`), []byte(`[{"name": "disk-a", "type": "child<virtio-blk-pci>"}, {"name": "type", "type": "string"}]`), []byte(`[{"fdset-id": 1}]`))
	f.Add([]byte(`null`), []byte(`[null]`), []byte(`[{}]`), []byte(`[{"fdset-id": -1}]`))
	f.Add([]byte(`[]`), []byte(`{}`), []byte(`7`), []byte(`"x"`))
	f.Fuzz(func(t *testing.T, status, nodes, devices, sets []byte) {
		answers := map[string][]byte{"query-status": status, "query-blockstats": nodes, "qom-list": devices, "query-fdsets": sets}
		now, err := askState(t.Context(), func(_ context.Context, command string, _, result any) error {
			return json.Unmarshal(answers[command], result)
		})
		if err != nil {
			return
		}
		// For any answer each command has one definite outcome, and an empty name matches no node.
		for _, command := range []string{"blockdev-add", "blockdev-del", "device_add", "device_del", "block_resize", "add-fd", "remove-fd"} {
			if (subject{Node: "none", Device: "none", Set: 1 << 30}).outcome(command, now) == unknown {
				t.Errorf("%s: not decided by %+v", command, now)
			}
		}
	})
}

// The test cuts a real QEMU's connection at random places, in either direction. The machine has no
// guest; a reset completes pending unplugs.
func TestRealQEMUContinuesAfterALostConnection(t *testing.T) {
	vm := realVM(t)
	must(t, vm.execute(limited(t), "set-action", map[string]string{"reboot": "reset"}, nil))
	must(t, vm.execute(limited(t), "cont", nil, nil))
	p, front := listenProxy(t, vm.path(monitorSocket))
	first := vm.qmp
	const rounds = 40
	for round := range rounds {
		vm.qmp.Close()
		next := p.connections() + 1
		// about the number of bytes that the script sends, and receives in answers and events
		p.cutAt(next, round%2, rand.IntN([]int{toQEMU: 900, fromQEMU: 1500}[round%2]))
		for err := errors.New("not yet"); err != nil; { // the first greeting may be cut
			vm.qmp, err = qmp.Dial(limited(t), front, vm.settle)
		}
		go vm.watchDisks(vm.qmp.Subscribe(diskEvents...))
		stop, reset := make(chan struct{}), make(chan struct{})
		go func() { defer close(reset); resetUntil(vm, stop) }()
		id := fmt.Sprintf("d%d", round)
		err := script(limited(t), vm, id, image(t, mib))
		close(stop)
		<-reset
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		now, err := askState(limited(t), vm.qmp.Execute)
		must(t, err)
		if len(now.nodes) != 0 || len(now.sets) != 0 || slices.ContainsFunc(slices.Collect(maps.Keys(now.devices)), func(device string) bool { return strings.HasPrefix(device, "disk-") }) || now.run != running {
			t.Errorf("round %d:\nwant nothing left\ngot  %+v", round, now)
		}
	}
	vm.qmp.Close()
	vm.qmp = first
	t.Logf("%d of %d connections were cut", p.madeCuts(), rounds)
	if p.madeCuts() < rounds/2 {
		t.Errorf("cuts:\nwant at least %d\ngot  %d", rounds/2, p.madeCuts())
	}
}

// resetUntil resets the machine repeatedly until stop is closed.
func resetUntil(vm *VM, stop <-chan struct{}) {
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case <-stop:
			return
		case <-again.C:
			_ = vm.qmp.Execute(context.Background(), "system_reset", nil, nil) // this connection may be cut too
		}
	}
}

// A command that is cut on each connection is not sent for ever.
func TestCommandThatIsCutEachTimeHasAnUnknownOutcome(t *testing.T) {
	vm, _ := fakeVM(t)
	sent := 0
	err := vm.decided(limited(t), "blockdev-add", map[string]string{"node-name": "never"}, func() error {
		sent++
		return qmp.ErrOutcomeUnknown
	})
	if !errors.Is(err, qmp.ErrOutcomeUnknown) || sent != 1+maxCuts {
		t.Errorf("want %v after being sent once and again %d times\ngot  %v after %d", qmp.ErrOutcomeUnknown, maxCuts, err, sent)
	}
}
