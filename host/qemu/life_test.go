package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/qmp"
)

// With these variables the test binary plays the programs that a VM starts.
const (
	playQEMU    = "DIRECTVOL_TEST_QEMU"
	playBackend = "DIRECTVOL_TEST_BACKEND"
	playParent  = "DIRECTVOL_TEST_PARENT"
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(playParent) != "":
		beParent(os.Getenv(playParent))
	case len(os.Args) > 1 && os.Args[1] == "vhost-vsock":
		beBackend(os.Getenv(playBackend))
	case os.Getenv(playQEMU) != "" && slices.Contains(os.Args, "-version"):
		beVersion(os.Getenv(playQEMU))
	case os.Getenv(playQEMU) != "":
		beQEMU(os.Getenv(playQEMU))
	}
	code := m.Run()
	if built != "" {
		os.RemoveAll(built)
	}
	os.Exit(code)
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(2)
}

// beVersion plays a QEMU that prints its version, or refuses an option before that.
func beVersion(how string) {
	if how == "has no seccomp" {
		fatal(errors.New("qemu: -sandbox: invalid option"))
	}
	os.Exit(0)
}

// beQEMU plays QEMU, with the QMP socket inherited.
func beQEMU(how string) {
	if how == "dies" {
		fatal(errors.New("qemu: no such machine"))
	}
	l, err := net.FileListener(os.NewFile(firstExtraFile, "monitor"))
	if err != nil {
		fatal(err)
	}
	fmt.Println("console says hello")
	q := newFakeQEMU()
	q.hook = func(command string, _ json.RawMessage) (any, *qmp.Error, bool) {
		switch command {
		case "quit":
			q.event("SHUTDOWN", `{"guest": true, "reason": "guest-shutdown"}`)
			os.Exit(0)
		case "crash":
			fatal(fmt.Errorf("%s\nqemu: boom", strings.Repeat("x", 2*tailBytes)))
		}
		return nil, nil, false
	}
	q.serve(l)
	select {}
}

// beBackend plays the vsock backend.
func beBackend(how string) {
	if how == "dies" {
		fatal(errors.New("backend: no"))
	}
	l, err := net.Listen("unix", os.Args[slices.Index(os.Args, "--socket")+1])
	if err != nil {
		fatal(err)
	}
	for open := []net.Conn{}; ; { // kept, so that the garbage collector closes none
		conn, err := l.Accept()
		if err != nil {
			fatal(err)
		}
		open = append(open, conn)
	}
}

// beParent starts a VM, prints the numbers of its processes and waits to be killed.
func beParent(dir string) {
	os.Unsetenv(playParent)
	vm, err := Start(context.Background(), playedConfig(dir))
	if err != nil {
		fatal(err)
	}
	fmt.Println(vm.qemu.cmd.Process.Pid)
	select {}
}

// kill ends a VM.
func kill(t *testing.T, vm *VM) {
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := vm.Kill(ctx); err != nil {
		t.Error(err)
	}
}

func playedConfig(dir string) Config {
	program, err := os.Executable()
	if err != nil {
		fatal(err)
	}
	return Config{Dir: dir, GuestCID: 3, Binary: program, Directvol: program}
}

// startPlayed starts a VM of played programs.
func startPlayed(t *testing.T, qemu, backend string, change func(*Config)) (*VM, error) {
	t.Helper()
	t.Setenv(playQEMU, qemu)
	t.Setenv(playBackend, backend)
	cfg := playedConfig(shortDir(t))
	if change != nil {
		change(&cfg)
	}
	vm, err := Start(limited(t), cfg)
	if err == nil {
		t.Cleanup(func() { kill(t, vm) })
	}
	return vm, err
}

// shortDir returns the path of a directory that does not exist yet. The path is short enough for
// sockets, however long the test's name is.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "vm")
}

// lockedBuffer is a console that is safe for concurrent use.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func TestShutdownIsReportedAndLeavesNothing(t *testing.T) {
	console := &lockedBuffer{}
	vm, err := startPlayed(t, "serves", "serves", func(c *Config) { c.Console = console })
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(vm.cfg.Dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("runtime directory: want mode 0700, got %v, %v", info, err)
	}
	vm.QMP().Execute(limited(t), "quit", nil, nil)
	got, err := vm.AwaitShutdown(limited(t))
	if want := (Shutdown{Guest: true, Reason: "guest-shutdown"}); err != nil || got != want {
		t.Errorf("shutdown:\nwant %+v\ngot  %+v, %v", want, got, err)
	}
	if want := "console says hello\n"; console.text.String() != want {
		t.Errorf("console:\nwant %q\ngot  %q", want, console.text.String())
	}
	if _, err := os.Stat(vm.cfg.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the runtime directory is left: %v", err)
	}
	if err := vm.VsockErr(); err == nil {
		t.Error("vsock works without a VM")
	}
}

// A disk that is recorded as gone before its VM's end is known looks as if it had left by itself.
func TestDisksGoNoSoonerThanTheirVMHasEnded(t *testing.T) {
	vm, err := startPlayed(t, "serves", "serves", nil)
	must(t, err)
	a, err := vm.AttachDisk(limited(t), Disk{ID: "data", Path: image(t, mib)})
	must(t, err)
	_ = vm.QMP().Execute(limited(t), "quit", nil, nil) // the answer may not come
	<-a.Gone
	select {
	case <-vm.Done():
	default:
		t.Error("the disk is gone, and the VM has not ended")
	}
}

func TestQEMUWithoutSeccompRunsAndIsWarnedOf(t *testing.T) {
	for how, want := range map[string]bool{"serves": true, "has no seccomp": false} {
		said := &lockedBuffer{}
		log := logrus.New()
		log.SetOutput(said)
		vm, err := startPlayed(t, how, "serves", func(c *Config) { c.Log = logrus.NewEntry(log) })
		if err != nil {
			t.Fatal(err)
		}
		if got := vm.Confined(); got != want || slices.Contains(vm.CommandLine(), "-sandbox") != want {
			t.Errorf("QEMU that %s, confined:\nwant %v\ngot  %v, %q", how, want, got, vm.CommandLine())
		}
		if got := !strings.Contains(said.text.String(), "without its seccomp filter"); got != want {
			t.Errorf("QEMU that %s: the log says:\n%s", how, said.text.String())
		}
	}
}

func TestEveryCallReportsACrash(t *testing.T) {
	vm, err := startPlayed(t, "serves", "serves", nil)
	if err != nil {
		t.Fatal(err)
	}
	check := func(call string, err error) {
		t.Helper()
		if !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "exit status 2") || !strings.Contains(err.Error(), "qemu: boom") {
			t.Errorf("%s:\nwant the exit status and QEMU's last words\ngot  %v", call, err)
		}
		if len(err.Error()) > tailBytes+500 {
			t.Errorf("%s: an error of %d bytes", call, len(err.Error()))
		}
	}
	check("in flight", vm.execute(limited(t), "crash", nil, nil))
	_, err = vm.AwaitShutdown(limited(t))
	check("AwaitShutdown", err)
	_, err = vm.AttachDisk(limited(t), Disk{ID: "a", Path: image(t, mib)})
	if !errors.Is(err, ErrEnded) {
		t.Errorf("AttachDisk:\nwant %v\ngot  %v", ErrEnded, err)
	}
}

func TestFailedStartLeavesNothing(t *testing.T) {
	for _, test := range []struct {
		name, qemu, backend, want string
		change                    func(*Config)
	}{
		{"QEMU dies", "dies", "serves", "qemu: no such machine", nil},
		{"no such disk", "serves", "serves", "/nonexistent", func(c *Config) { c.BootDisks = []Disk{{ID: "a", Path: "/nonexistent"}} }},
		{"a long path", "serves", "serves", "shorter", func(c *Config) { c.Dir += strings.Repeat("x", 100) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := ""
			_, err := startPlayed(t, test.qemu, test.backend, func(c *Config) {
				if test.change != nil {
					test.change(c)
				}
				dir = c.Dir
			})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("want %s\ngot  %v", test.want, err)
			}
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the runtime directory is left: %v", err)
			}
		})
	}
}

// over is a context that has ended where nobody waits for it: it ends between two looks.
type over struct{ context.Context }

func (over) Err() error { return context.DeadlineExceeded }

// Start returned a VM without a QEMU when its context ended just after a program had said that it
// knows -sandbox.
func TestStartWhoseContextEndsBetweenItsStepsFails(t *testing.T) {
	_, err := Start(over{limited(t)}, Config{Dir: filepath.Join(shortDir(t), "vm"), GuestCID: 3, Binary: "true", Stores: testStores(t)})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want %v\ngot  %v", context.DeadlineExceeded, err)
	}
}

func TestRunningVMKeepsItsDirectory(t *testing.T) {
	vm, err := startPlayed(t, "serves", "serves", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Start(limited(t), vm.cfg); err == nil || !strings.Contains(err.Error(), "a VM runs in it") {
		t.Errorf("a second VM in its directory: want a refusal, got %v", err)
	}
	if _, err := os.Stat(vm.path(monitorSocket)); err != nil {
		t.Errorf("the running VM's socket: %v", err)
	}
}

func TestKillIsNoShutdown(t *testing.T) {
	vm, err := startPlayed(t, "serves", "serves", nil)
	if err != nil {
		t.Fatal(err)
	}
	kill(t, vm)
	kill(t, vm)
	if _, err := vm.AwaitShutdown(limited(t)); !errors.Is(err, ErrEnded) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("want ErrEnded by a signal, got %v", err)
	}
}

// startBackendAlone starts only a VM's played backend, whatever vsock the host has.
func startBackendAlone(t *testing.T, how string) (*VM, error) {
	t.Setenv(playBackend, how)
	vm := &VM{cfg: playedConfig(t.TempDir()), qemu: &process{done: make(chan struct{})}}
	vm.cfg.Dir = filepath.Dir(shortDir(t))
	err := vm.startBackend(limited(t))
	if vm.backend != nil {
		t.Cleanup(func() { _ = vm.backend.kill(longEnough) })
	}
	return vm, err
}

func TestDeadBackendIsReported(t *testing.T) {
	vm, err := startBackendAlone(t, "serves")
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.VsockErr(); err != nil {
		t.Errorf("while it works: %v", err)
	}
	vm.backend.cmd.Process.Kill()
	<-vm.VsockDone()
	if err := vm.VsockErr(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("want how it ended, got %v", err)
	}
}

func TestBackendThatDoesNotStartIsReported(t *testing.T) {
	if _, err := startBackendAlone(t, "dies"); err == nil || !strings.Contains(err.Error(), "backend: no") {
		t.Errorf("want its last words, got %v", err)
	}
	vm := &VM{vsock: vsockTransport{reason: "no device"}}
	if err := vm.startBackend(limited(t)); err == nil || !strings.Contains(err.Error(), "set Directvol") {
		t.Errorf("without a program: want what to set, got %v", err)
	}
}

func TestQEMUDoesNotOutliveItsParent(t *testing.T) { killedParent(t) }

// TestADirectoryWhoseOwnerWasKilledIsTakenOver: its sockets are stale, and nothing locks it.
func TestADirectoryWhoseOwnerWasKilledIsTakenOver(t *testing.T) {
	dir := killedParent(t)
	left, err := os.ReadDir(dir)
	if err != nil || len(left) == 0 {
		t.Fatalf("want what a killed process leaves\ngot  %v, %v", left, err)
	}
	t.Setenv(playQEMU, "serves")
	t.Setenv(playBackend, "serves")
	for ctx := limited(t); ; {
		vm, err := Start(ctx, playedConfig(dir))
		if err == nil {
			kill(t, vm)
			break
		}
		if ctx.Err() != nil || !strings.Contains(err.Error(), "a running process listens on") { // the backend's socket is taken until the backend is killed, after its parent
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("afterwards\nwant an empty directory\ngot  %v, %v", left, err)
	}
}

// killedParent kills a process with a VM, waits until the VM's QEMU has ended and returns the VM's
// directory.
func killedParent(t *testing.T) (dir string) {
	t.Helper()
	dir = shortDir(t)
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.Command(program)
	parent.Env = append(os.Environ(), playParent+"="+dir, playQEMU+"=serves", playBackend+"=serves")
	parent.Stderr = os.Stderr
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	_, err = fmt.Fscan(out, &pid)
	if err != nil {
		t.Fatal(err, parent.Wait())
	}
	qemu, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(qemu)
	parent.Process.Kill()
	parent.Wait()
	// A pidfd becomes readable when its process ends.
	fds := []unix.PollFd{{Fd: int32(qemu), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(longEnough.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 || err != nil {
			t.Errorf("QEMU runs on without its parent: %d, %v", n, err)
		}
		return dir
	}
}

func TestConsoleThatFailsIsStillDrained(t *testing.T) {
	d := &drain{to: failingWriter{}}
	for range 2 {
		if n, err := d.Write([]byte("text")); n != 4 || err != nil {
			t.Errorf("want 4 bytes taken, got %d, %v", n, err)
		}
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("no") }

func TestTailKeepsTheEnd(t *testing.T) {
	var said tail
	for i := range 10000 {
		fmt.Fprintf(&said, "line %d\n", i)
	}
	if got := said.String(); len(got) > tailBytes || !strings.HasSuffix(got, "line 9999") {
		t.Errorf("want at most %d bytes up to line 9999, got %d bytes: …%q", tailBytes, len(got), got[len(got)-20:])
	}
}

func TestAwaitShutdownEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := (&VM{done: make(chan struct{})}).AwaitShutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("want %v, got %v", context.DeadlineExceeded, err)
	}
}

// A QEMU that waits in the kernel for a dead disk takes its SIGKILL only when the disk answers.
// Kill must not wait that long.
func TestKillEndsWithItsContextAndNamesWhatIsLeft(t *testing.T) {
	p, err := startProcess(limited(t), "QEMU", exec.Command("sleep", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	vm := &VM{qemu: p, done: make(chan struct{})} // done is never closed, as if the process never ended
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = vm.Kill(ctx)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), fmt.Sprintf("QEMU (process %d, state", p.cmd.Process.Pid)) {
		t.Errorf("want the process named\ngot  %v", err)
	}
	<-p.done // it was killed nevertheless
}

// The end of a machine waits for a process that does not end although it was killed, as if a disk
// held it up.
func TestProcessThatDoesNotEndIsAwaitedForALimitedTime(t *testing.T) {
	p, err := startProcess(limited(t), "QEMU", exec.Command("sleep", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	log, said := logrus.New(), new(strings.Builder)
	log.SetOutput(said)
	synctest.Test(t, func(t *testing.T) {
		stuck := &process{name: p.name, cmd: p.cmd, said: p.said, done: make(chan struct{})}
		vm := &VM{log: logrus.NewEntry(log), qemu: stuck, disks: newDiskTable(1, nil, "a test")}
		began := time.Now()
		if vm.cleanUp(); time.Since(began) != reapTimeout {
			t.Errorf("want it awaited for %v\ngot  %v", reapTimeout, time.Since(began))
		}
		<-p.done          // it was killed
		close(stuck.done) // its stores are released
	})
	if want := fmt.Sprintf("QEMU (process %d", p.cmd.Process.Pid); !strings.Contains(said.String(), want) {
		t.Errorf("want %s named\ngot  %s", want, said)
	}
}
