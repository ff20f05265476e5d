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

// testInit is the kernel's option that starts tests/guest beside the agent.
const testInit = "rdinit=/test-guest"

// freeCID returns a guest CID that no other VM of this host is likely to have;
// the first three have meanings of their own (vsock(7)).
func freeCID() uint32 { return 3 + rand.Uint32N(1<<31) }

// Options say how a guest differs from the ordinary test guest.
type Options struct {
	// Shipped boots the image that is shipped, without tests/guest: Act then
	// reaches nobody.
	Shipped bool
	// Image is what to boot instead of what make has built. It must hold
	// tests/guest.
	Image string
	// Newer boots the newer kernel, with a test image for it.
	Newer bool
	// Append is added to the kernel's command line.
	Append string
	// MemoryMiB is the guest's memory; as host/qemu has it where it is 0.
	MemoryMiB int
	// BootDisks are images that are there from the start, on the root bus.
	BootDisks []qemu.Disk
	// Dir is a folder of the caller's for this guest, which Close leaves; where it is
	// empty the guest gets one of its own.
	Dir string
	// Console gets what the guest says on its console, beside what Explain shows.
	Console io.Writer
	// Log is where the host's side tells what it does; nowhere where nil.
	Log io.Writer
}

// Guest is a sandbox that is running, with a program inside that acts for tests.
type Guest struct {
	*sandbox.Sandbox
	// Act acts inside the guest, behind the agent's back.
	Remote *remote.Client
	// Dir is a folder on the host for this guest's disks. It goes with it, unless the
	// caller has chosen it.
	Dir string

	console *console
	vm      *qemu.VM
	keeps   bool     // Dir, which is the caller's
	lock    *os.File // Dir's, where it is the guest's own
}

// Limit is how long something may take that takes base with KVM: longer where
// the guest is emulated. Every time limit of tests and demo comes from here; it
// is there to end what hangs, and says nothing about speed.
func Limit(base time.Duration) time.Duration {
	if qemu.DetectAccelerator().KVM() {
		return base
	}
	return 6 * base
}

// bootLimit is how long a guest takes to answer, as a base for Limit.
const bootLimit = 20 * time.Second

// Boot boots a guest and returns when its agent answers. The caller ends it, by
// Stop or Kill, and then by Close.
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

// VM is the guest's machine, which stays its sandbox's: tests look at it, and put faults below its disks.
func (g *Guest) VM() *qemu.VM { return g.vm }

// killLimit is how long QEMU has to end, which only a disk that does not answer holds up.
const killLimit = 10 * time.Second

// Kill ends the guest as pulling the plug does.
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

// Dial reaches a vsock port of the guest.
func (g *Guest) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	to, err := address.Parse(g.VM().GuestAddress(port))
	if err != nil {
		return nil, err
	}
	return to.Dial(ctx)
}

// Close removes what the guest leaves on the host, its disks among it.
func (g *Guest) Close() error {
	if g.keeps {
		return nil
	}
	defer g.lock.Close()
	return os.RemoveAll(g.Dir)
}

// consoleLines is how much of the console a failure prints.
const consoleLines = 40

// Explain tells, of a guest in which something failed, what its console said
// last and how to boot the same by hand.
func (g *Guest) Explain(w io.Writer) {
	fmt.Fprintf(w, "the guest's console ends with:\n%s\nboot the same by hand:\n%s\n", g.console.tail(consoleLines), g.VM().Reproduce())
}
