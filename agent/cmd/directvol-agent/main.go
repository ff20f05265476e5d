// Command directvol-agent runs inside a guest, as PID 1 or as a service, and mounts, measures,
// grows and watches the volumes that its host attaches. It speaks ttrpc over vsock, wire-compatible
// with Kata Containers' agent.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/guest"
	"github.com/directvol/directvol/agent/guestinit"
	"github.com/directvol/directvol/agent/health"
	"github.com/directvol/directvol/agent/metrics"
	"github.com/directvol/directvol/agent/rpc"
	"github.com/directvol/directvol/agent/sandbox"
	"github.com/directvol/directvol/agent/server"
	"github.com/directvol/directvol/agent/storage"
	"github.com/directvol/directvol/agent/volume"
	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/protocols/version"
)

const (
	// callLimit bounds how long the calls in flight may go on when a service ends: longer than any
	// call that unmounts. A call that waits for a disk may take longer and is cut.
	callLimit = 10 * time.Second
	// unmountLimit bounds how long the guest's end waits for disks that end no request while it
	// unmounts the volumes; syncLimit bounds the final sync in the same way. The guest's end also
	// waits for disks that are only slow.
	unmountLimit = 10 * time.Second
	syncLimit    = 5 * time.Second
	// processLimit is how long each process may take to end when the guest does.
	processLimit = 2 * time.Second
)

func main() {
	// One processor for the thread that waits in a system call for the host, and one for work,
	// whatever the guest has. With fewer, the runtime takes the waiting thread's processor away and
	// has to find another one when the host calls.
	runtime.GOMAXPROCS(max(2, runtime.NumCPU()))
	// The live heap is about 200 KB. GOGC=25 starts the first collection at 1 MB; by default the
	// heap would grow to 4 MB and stay there.
	debug.SetGCPercent(25)
	entry, kept := newLog()
	asInit := os.Getpid() == 1
	modules := func() error { return nil }
	if asInit {
		// Not fatal: a guest that still answers can be examined.
		if err := guestinit.Mount(); err != nil {
			entry.Error(err)
		}
	}
	set := configure(entry, asInit)
	entry.Logger.SetLevel(set.level)
	if set.logPort == 0 {
		kept.toConsole()
	}
	if asInit {
		guestinit.Reap()
		// The other modules are loaded while the first calls are answered, because xfs alone takes
		// a second of an emulated guest's boot.
		var err error
		if modules, err = guestinit.LoadModulesUntil(modulelist.Path, modulelist.VsockTransport); err != nil {
			entry.Error(err)
		}
	}
	how, err := serve(entry, kept, set, asInit, modules)
	if err != nil {
		// Log it at any level: an end without a reason helps nobody.
		entry.Logger.SetLevel(max(set.level, logrus.ErrorLevel))
		entry.Error(err)
		kept.toConsole() // the host may not have read it over vsock
	}
	kept.flush()
	if asInit && (how == signalled || set.powerOff && (how == destroyed || err != nil)) {
		// Also if the agent cannot serve: the end of PID 1 would panic the kernel, which tells the
		// host less.
		ctx, cancel := health.Patient(context.Background(), syncLimit, health.AnyDisk)
		err = guestinit.PowerOff(ctx)
		cancel()
		entry.Error(err)
		kept.flush()
	}
	if err != nil {
		os.Exit(1)
	}
}

// configure reads the settings. As PID 1, the agent ignores its arguments, which are the words of
// the kernel's command line that the kernel does not know, and uses the defaults for wrong options.
// A service exits on a wrong option.
func configure(log *logrus.Entry, asInit bool) settings {
	set := defaults()
	line, err := os.ReadFile("/proc/cmdline")
	if err == nil {
		err = set.fromKernel(string(line))
	}
	if err != nil {
		log.Warn(err)
	}
	if asInit {
		return set
	}
	told, err := set.fromFlags(os.Args[1:])
	if err != nil {
		fmt.Fprintf(os.Stderr, "directvol-agent: %v; see -help\n", err)
		os.Exit(2)
	}
	if told != "" {
		fmt.Print(told)
		os.Exit(0)
	}
	return set
}

// ending is why the agent ends.
type ending int

const (
	failed    ending = iota // with an error
	destroyed               // the sandbox is destroyed, and the VM is to end
	signalled               // a signal or the power button
)

// signals make the agent end, and the VM too if the agent is PID 1. Ctrl-Alt-Del arrives as SIGINT
// (kernel/reboot.c), a failing power supply as SIGPWR.
var signals = []os.Signal{unix.SIGTERM, os.Interrupt, unix.SIGPWR}

// serve answers calls until the sandbox is destroyed and the VM is to end, or until a signal.
func serve(log *logrus.Entry, kept *keptLog, set settings, asInit bool, modules func() error) (ending, error) {
	ctx, stop := untilTold(asInit, log)
	defer stop()
	// Health is watched, and saved, until the last call has ended.
	life, end := context.WithCancel(context.Background())
	defer end()
	monitor := health.NewMonitor(log)
	monitor.Low = set.low
	defer monitor.End()
	volumes := volume.NewTable(monitor)
	state, err := newState(set, asInit)
	if err != nil {
		return failed, err
	}
	defer state.Close()
	over := make(chan (<-chan struct{}), 1)
	storages := storage.NewTable(log, volumes, set.hotplug, state)
	box := sandbox.New(log, storages)
	box.Guest, box.Sync = guest.New(asInit), volumes.Sync
	counts := new(metrics.Calls)
	agent := &rpc.Agent{
		Log: log, Version: version.String(), Init: asInit, ResizeWait: set.resizeWait, Volumes: volumes,
		Sandbox: box, Storages: storages, Guest: box.Guest, Counts: counts,
	}
	loaded := make(chan struct{})
	server := &server.Server{Log: log, Ready: loaded, Counts: counts}
	if err := server.Listen(set.listen, agent.Calls()); err != nil {
		return failed, err
	}
	defer server.Close()
	// After the agent's own listener, so that nothing else takes its port.
	kept.toVsock(set.logPort, log)
	openDebugConsole(ctx, set, asInit, log)
	// After Listen: if two agents are started by mistake, only one gets this far, and they share
	// one state file.
	defer keepLeases(state, volumes, log)() // before a probe writes to a volume that is still frozen
	if err := storages.Recover(); err != nil {
		log.Error(err)
	}
	follow(life, log, monitor.Run, monitor.Beat, monitor.Sizes, monitor.Errors, volumes.FollowMounts)
	go storages.Follow(life, monitor.Remembers())
	go volumes.TrimEvery(ctx, set.trim, log) // until the agent is asked to end, not while it unmounts
	agent.Destroyed = func() {
		if asInit && set.powerOff {
			select {
			case over <- server.HungUp():
			default: // the agent is already ending
			}
		}
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve() }()
	go load(modules, loaded, log)
	if err := notifyReady(); err != nil {
		log.Warn(err)
	}
	log.WithField("address", server.Addr()).Info("directvol-agent answers")
	select {
	case err := <-served:
		return failed, fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
		return signalled, shutDown(server, agent)
	case hungUp := <-over:
		if !server.AwaitHangUp(hungUp) {
			log.Warn("the host did not close its connection after the answer to DestroySandbox")
		}
		return destroyed, nil
	}
}

// untilTold returns a context that ends on a signal. For PID 1, it also ends when the guest's power
// button is pressed, which a host does that has lost its vsock connection.
func untilTold(asInit bool, log *logrus.Entry) (ctx context.Context, stop func()) {
	ctx, stop = signal.NotifyContext(context.Background(), signals...)
	if !asInit {
		return ctx, stop
	}
	ctx, press := context.WithCancel(ctx)
	go func() {
		err := guestinit.AwaitPowerButton(ctx)
		if err != nil && ctx.Err() == nil {
			log.Warnf("the power button has no effect: %v", err)
			return
		}
		press()
	}()
	return ctx, func() {} // a second signal would end PID 1, and panic the kernel, during the power-off
}

// endGuest ends every process and unmounts every volume.
func endGuest(guest *sandbox.Sandbox, volumes *volume.Table, log *logrus.Entry) {
	guestinit.EndAll(processLimit)
	err := guest.Destroy(context.Background())
	if err == nil {
		return
	}
	log.Errorf("the guest powers off, but some mounts could not be unmounted: %v", err)
	ctx, cancel := volumes.Patient(context.Background(), unmountLimit)
	defer cancel()
	if err := guest.UnmountEach(ctx); err != nil {
		log.Errorf("written data may not have reached its disk: %v", err)
	}
}

// follow starts functions that run until ctx ends, and returns at once.
func follow(ctx context.Context, log *logrus.Entry, all ...func(context.Context) error) {
	for _, follow := range all {
		go func() {
			if err := follow(ctx); err != nil && ctx.Err() == nil {
				log.Warn(err)
			}
		}()
	}
}

// load loads the modules that only storages need. Calls of Health are answered meanwhile; calls
// that mount wait.
func load(modules func() error, loaded chan<- struct{}, log *logrus.Entry) {
	defer close(loaded)
	if err := modules(); err != nil {
		log.Error(err)
	}
}

// shutDown lets the calls in flight finish and closes the connections. As PID 1 it also ends the
// guest.
func shutDown(server interface{ Shutdown(context.Context) error }, agent *rpc.Agent) error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	err := server.Shutdown(ctx)
	if agent.Init {
		endGuest(agent.Sandbox, agent.Volumes, agent.Log)
	}
	return err
}
