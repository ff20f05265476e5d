// Package qemu runs one virtual machine with qemu-system-x86_64 and changes its disks while it
// runs, by QMP (docs/interop/qmp-spec and qapi/*.json in QEMU's sources). It chooses the
// accelerator and the vsock transport by testing what the host can do.
//
// The PCI topology is fixed. So a disk's PCI path in the guest is known before the guest has seen
// the disk:
//
//	pcie.0 ─┬─ 02 … 0a  bridges b1 … b9, each with disks in 01 … 1e: paths 02/01, 02/02, …
//	        ├─ 10       vsock
//	        └─ 11 … 1e  boot disks, there from the start: paths 11, 12, …
//
// A disk consists of two block nodes and a device. FileNode opens the store by a descriptor;
// RawNode is above it, and the device uses RawNode. A test can put a faulty node between the two
// (ReplaceFileNode).
//
// In QEMU 8 and later (block/graph-lock.c), adding, removing or growing a node waits for the
// requests in flight of every disk. If one disk hangs, such a command blocks QEMU's main loop, and
// the guest, until that disk answers. This package does not send the command then (ErrDiskHangs).
// QEMU 7.2 does not wait. But every QEMU blocks while it closes or grows a store that hangs, so
// this package tries a store before either (package trial).
package qemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/registry"
	"github.com/directvol/directvol/protocols/address"
)

// startTimeout limits a Start whose context has no deadline.
const startTimeout = 30 * time.Second

// Config describes a VM. Dir, Kernel and GuestCID are required to boot; Directvol is required if
// the host has no /dev/vhost-vsock.
type Config struct {
	// Dir is the directory for the VM's sockets; the VM locks it while running. A missing directory
	// is made with mode 0700, and removed when the VM ends.
	Dir string
	// Kernel and Initrd are the paths of a kernel and its initial file system. Append is the
	// kernel's command line.
	Kernel, Initrd, Append string
	// MemoryMiB is the guest's memory; 0 means 1024. CPUs is the number of its processors; 0 means
	// 1.
	MemoryMiB, CPUs int
	// Bridges is the number of PCI bridges, of 30 disks each: at most 9; 0 means 2.
	Bridges int
	// GuestCID is the guest's vsock address: 3 or more, and different from every other VM's.
	GuestCID uint32
	// BootDisks are attached to the root bus before the guest starts, in this order. They cannot be
	// detached.
	BootDisks []Disk
	// Console receives the output of the guest's first serial port. It should not block, because
	// the guest would block too.
	Console io.Writer
	// Directvol is the path of the directvol program. Its vhost-vsock subcommand is the vsock
	// backend if the kernel has none.
	Directvol string
	// Binary is the QEMU program; empty means qemu-system-x86_64.
	Binary string
	// Stores keeps two VMs from using one store; nil means registry.Default.
	Stores *registry.Stores
	// Log is the logger; nil means logrus's standard logger.
	Log *logrus.Entry
}

// withDefaults sets the zero fields to their defaults, and refuses an invalid Config.
func (cfg Config) withDefaults() (Config, error) {
	setDefault(&cfg.MemoryMiB, 1024)
	setDefault(&cfg.CPUs, 1)
	setDefault(&cfg.Bridges, 2)
	setDefault(&cfg.Binary, "qemu-system-x86_64")
	if cfg.Console == nil {
		cfg.Console = io.Discard
	}
	if cfg.Log == nil {
		cfg.Log = logrus.NewEntry(logrus.StandardLogger())
	}
	if cfg.Stores == nil {
		cfg.Stores = registry.Default()
	}
	if cfg.Dir == "" {
		return cfg, errors.New("no runtime directory for the VM's sockets: set Dir")
	}
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return cfg, fmt.Errorf("runtime directory %s: %w", cfg.Dir, err)
	}
	switch {
	case cfg.GuestCID < 3 || cfg.GuestCID == ^uint32(0):
		return cfg, fmt.Errorf("guest CID %d: 0, 1, 2 and %d are reserved (vsock(7)): use 3 or more", cfg.GuestCID, ^uint32(0))
	case cfg.MemoryMiB < 0 || cfg.CPUs < 0:
		return cfg, fmt.Errorf("%d MiB of memory and %d processors: want positive numbers", cfg.MemoryMiB, cfg.CPUs)
	case cfg.Bridges < 0 || cfg.Bridges > maxBridges:
		return cfg, fmt.Errorf("%d PCI bridges: want 1 to %d", cfg.Bridges, maxBridges)
	case len(cfg.BootDisks) > maxBootDisks:
		return cfg, fmt.Errorf("%d boot disks: the root bus has room for %d", len(cfg.BootDisks), maxBootDisks)
	case cfg.Kernel == "" && (cfg.Initrd != "" || cfg.Append != ""):
		return cfg, errors.New("an initrd or a kernel command line without a kernel: set Kernel")
	}
	return cfg, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// VM is a running virtual machine. It is safe for concurrent use. It ends no later than the process
// that started it.
type VM struct {
	cfg         Config
	log         *logrus.Entry
	accelerator Accelerator
	vsock       vsockTransport
	confined    bool // QEMU runs with its seccomp filter
	dir         *directory
	monitor     *address.UnixSocket
	disks       *diskTable
	hotplug     *hotplug
	qemu        *process
	backend     *process // nil if the host's kernel is the backend
	qmp         *qmp.Client
	events      *qmp.Subscription
	major       int                                      // QEMU's major version
	requests    requestTable                             // requests of all disks in flight
	blind       sync.Once                                // logs once that requests cannot be observed
	hidden      sync.Once                                // logs once that stores cannot be tried by descriptor
	try         func(ctx context.Context, d *disk) error // tries whether a disk's store answers
	done        chan struct{}
	shutdown    *Shutdown // set before done is closed; nil if QEMU was not shut down
}

// Start starts a VM and returns when QEMU answers; the guest boots afterwards. The context limits
// Start alone: the VM runs until its guest powers off or Kill is called. A failed Start leaves
// nothing behind.
func Start(ctx context.Context, cfg Config) (*VM, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, startTimeout)
		defer cancel()
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("start VM: %w", err)
	}
	vm := &VM{cfg: cfg, log: cfg.Log, disks: newDiskTable(cfg.Bridges, cfg.Stores, "the VM in "+cfg.Dir), done: make(chan struct{})}
	vm.hotplug, vm.try = newHotplug(vm.requestAgain), vm.tryStore
	if err := vm.start(ctx); err != nil {
		vm.cleanUp()
		return nil, fmt.Errorf("start VM: %w", err)
	}
	go vm.supervise()
	return vm, nil
}

// start performs the steps of Start. After a failure, cleanUp removes what start has made.
func (vm *VM) start(ctx context.Context) error {
	binary, err := findBinary(vm.cfg.Binary)
	if err != nil {
		return err
	}
	vm.cfg.Binary = binary
	if err := canConfine(ctx, binary); ctx.Err() != nil {
		return cmp.Or(err, ctx.Err())
	} else if err != nil {
		vm.log.WithError(err).Warn("QEMU runs without its seccomp filter: a guest that takes it over may start programs on this host")
	} else {
		vm.confined = true
	}
	for i, d := range vm.cfg.BootDisks {
		if err := vm.disks.addBoot(ctx, i, d); err != nil {
			return err
		}
	}
	vm.accelerator = DetectAccelerator()
	vm.log.Infof("accelerator %s: %s", vm.accelerator.Name, vm.accelerator.Reason)
	vm.vsock = detectVsock("/")
	vm.log.Infof("vsock by %s: %s", vm.vsock.name(), vm.vsock.reason)
	if vm.dir, err = claimDirectory(vm.cfg.Dir); err != nil {
		return err
	}
	if !vm.vsock.inKernel {
		if err := vm.startBackend(ctx); err != nil {
			return err
		}
	}
	return vm.startQEMU(ctx)
}

// startQEMU starts QEMU. The QMP socket listens before QEMU starts, so that nothing has to wait for
// the socket to appear.
func (vm *VM) startQEMU(ctx context.Context) error {
	path := vm.path(monitorSocket)
	var err error
	if vm.monitor, err = address.ListenUnix(path); err != nil {
		return err
	}
	listener := os.NewFile(uintptr(vm.monitor.FD), path)
	defer listener.Close()
	cmd := vm.command(listener)
	cmd.Stdout = &drain{to: vm.cfg.Console}
	if vm.qemu, err = startProcess(ctx, "QEMU", cmd); err != nil {
		return err
	}
	listener.Close() // only QEMU holds the listener now, so Dial fails if QEMU ends
	client, err := qmp.Dial(ctx, path, vm.settle)
	if err != nil {
		return vm.explain(ctx, err)
	}
	vm.qmp, vm.major = client, client.Version().Major
	vm.events = client.Subscribe("SHUTDOWN")
	go vm.watchDisks(client.Subscribe(diskEvents...))
	return nil
}

// path returns the path of a file in the runtime directory.
func (vm *VM) path(name string) string { return filepath.Join(vm.cfg.Dir, name) }

// Accelerator returns the accelerator of the guest's processors, with the reason for its choice.
func (vm *VM) Accelerator() Accelerator { return vm.accelerator }

// Confined reports whether QEMU runs with its seccomp filter (-sandbox on). A QEMU built without
// seccomp runs unconfined, with a warning in the log.
func (vm *VM) Confined() bool { return vm.confined }

// Version returns QEMU's version.
func (vm *VM) Version() string { return vm.qmp.Version().String() }

// QMP returns the VM's QMP connection. The VM owns it: do not close it, and do not change the
// disks' nodes and devices.
func (vm *VM) QMP() *qmp.Client { return vm.qmp }

// explain adds to err how QEMU ended, if QEMU has. It waits briefly for that, because the QMP
// socket closes a moment before the process is reaped.
func (vm *VM) explain(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, reapTimeout)
	defer cancel()
	select {
	case <-vm.qemu.done:
		return fmt.Errorf("%w (%w)", vm.ended(), err)
	case <-ctx.Done():
		return err
	}
}
