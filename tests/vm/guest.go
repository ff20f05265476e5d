package vm

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/directvol/directvol/host/qemu"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tests/guest/remote"
)

// testInit is the kernel option that starts tests/guest together with the agent.
const testInit = "rdinit=/test-guest"

// freeCID returns a guest CID that probably no other VM of this host has. The first three CIDs have
// special meanings (vsock(7)).
func freeCID() uint32 { return 3 + rand.Uint32N(1<<31) }

// Options are the differences of a guest from the ordinary test guest.
type Options struct {
	// Shipped boots the shipped image, without tests/guest: Remote then reaches nobody.
	Shipped bool
	// Image is the image to boot instead of the one that make has built. It must contain
	// tests/guest.
	Image string
	// Newer boots the newer kernel, with a test image for it.
	Newer bool
	// Append is added to the kernel's command line.
	Append string
	// MemoryMiB is the guest's memory; 0 means host/qemu's default.
	MemoryMiB int
	// Bridges is the number of PCI bridges, of 30 disks each; 0 means host/qemu's default.
	Bridges int
	// BootDisks are images that are attached at boot, on the root bus.
	BootDisks []qemu.Disk
	// Dir is the caller's folder for this guest, which Close does not remove. If it is empty, the
	// guest gets its own folder.
	Dir string
	// Console receives the guest's console output, in addition to the part that Explain shows.
	Console io.Writer
	// Log receives the log of the host's side; nil discards the log.
	Log io.Writer
}

// Guest is a running sandbox, with a program inside that acts for tests.
type Guest struct {
	*sandbox.Sandbox
	// Remote acts inside the guest, without the agent's knowledge.
	Remote *remote.Client
	// Dir is the folder for this guest's disks on the host. Close removes the folder, unless the
	// caller chose it.
	Dir string

	console *console
	vm      *qemu.VM
	keeps   bool     // whether Dir is the caller's and stays
	lock    *os.File // lock of Dir, if the guest made Dir
}

// Limit returns the time limit for work that takes base with KVM: it is longer if the guest is
// emulated. Every time limit of tests and demo comes from here. A limit only ends hanging work, and
// says nothing about speed.
func Limit(base time.Duration) time.Duration {
	if qemu.DetectAccelerator().KVM() {
		return base
	}
	return 6 * base
}

// bootLimit is the time limit for a guest's first answer, as a base for Limit.
const bootLimit = 20 * time.Second

// Boot boots a guest and returns when its agent answers. The caller ends the guest with Stop or
// Kill, and then calls Close.
func Boot(ctx context.Context, o Options) (*Guest, error) {
	build, err := FindBuild()
	if err != nil {
		return nil, err
	}
	if o.Newer {
		if build.Kernel, build.TestImage, err = build.Newer(); err != nil {
			return nil, err
		}
	}
	g := &Guest{Dir: o.Dir, console: &console{}, keeps: o.Dir != ""}
	if !g.keeps {
		if g.Dir, g.lock, err = makeFolder(); err != nil {
			return nil, err
		}
	}
	g.Remote = remote.NewClient(g.Dial)
	ctx, cancel := context.WithTimeout(ctx, Limit(bootLimit))
	defer cancel()
	g.Sandbox, err = sandbox.Start(ctx, g.config(build, o))
	if err != nil {
		g.Close()
		if said := g.console.tail(consoleLines); said != "" {
			err = fmt.Errorf("%w\nthe guest's console ends with:\n%s", err, said)
		}
		return nil, err
	}
	return g, nil
}

// VM returns the guest's machine, which still belongs to the sandbox. Tests look at the machine and
// put faults below its disks.
func (g *Guest) VM() *qemu.VM { return g.vm }

// killLimit is the time limit for the end of QEMU, which only a disk that does not answer delays.
const killLimit = 10 * time.Second

// Kill kills the guest, like pulling its plug.
func (g *Guest) Kill() {
	ctx, cancel := context.WithTimeout(context.Background(), Limit(killLimit))
	defer cancel()
	if err := g.Sandbox.Kill(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

func (g *Guest) config(build Build, o Options) sandbox.Config {
	log := logrus.New()
	log.SetOutput(io.Discard)
	if o.Log != nil {
		log.SetOutput(o.Log)
	}
	var said io.Writer = g.console
	if o.Console != nil {
		said = io.MultiWriter(g.console, o.Console)
	}
	image := cmp.Or(o.Image, build.TestImage)
	if o.Shipped {
		image = build.Image
	} else {
		o.Append = testInit + " " + o.Append
	}
	cfg := qemu.Config{
		Dir:       filepath.Join(g.Dir, "vm"),
		Kernel:    build.Kernel,
		Initrd:    image,
		Append:    o.Append,
		MemoryMiB: o.MemoryMiB,
		GuestCID:  freeCID(),
		Bridges:   o.Bridges,
		BootDisks: o.BootDisks,
		Console:   said,
		Directvol: build.Directvol,
		Log:       logrus.NewEntry(log),
	}
	return sandbox.Config{ID: "test", Log: cfg.Log, Boot: func(ctx context.Context) (sandbox.Machine, error) {
		machine, err := qemu.StartMachine(ctx, cfg)
		if err != nil {
			return nil, err
		}
		g.vm = machine.VM
		return machine, nil
	}}
}

// Dial connects to a vsock port of the guest.
func (g *Guest) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	to, err := address.Parse(g.VM().GuestAddress(port))
	if err != nil {
		return nil, err
	}
	return to.Dial(ctx)
}

// Close removes the guest's files on the host, including its disks.
func (g *Guest) Close() error {
	if g.keeps {
		return nil
	}
	defer g.lock.Close()
	return os.RemoveAll(g.Dir)
}

// consoleLines is the number of console lines that a failure prints.
const consoleLines = 40

// Explain writes, after a failure in the guest, the end of its console and the command that boots
// the same guest by hand.
func (g *Guest) Explain(w io.Writer) {
	fmt.Fprintf(w, "the guest's console ends with:\n%s\nboot the same by hand:\n%s\n", g.console.tail(consoleLines), g.VM().Reproduce())
}
