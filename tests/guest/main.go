// Command guest is the program that acts inside test guests: it serves tests/guest/remote's operations and an echo over vsock. No other image holds it.
//
// A test image has it as /test-guest, and its kernel is told rdinit=/test-guest. As PID 1 it starts itself once more, as a child that serves, and becomes /init, which is
// the agent and has PID 1's duties: neither knows of the other, and the agent that is tested is the one that is shipped. Told agent_as_service it stays PID 1 instead, and runs the agent as a service; told root_on_disk it makes place for another
// system's init.
//
// Where it is an image's /init itself it loads the image's modules, mounts the disk that the kernel is told of as first_disk=, and serves the echo, and that is all: the least that a guest can do to answer, which a boot is
// measured against. Told bare-echo it is the echo that round trips are measured against.
package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/guestinit"
	"github.com/directvol/directvol/protocols/modulelist"
	"github.com/directvol/directvol/tests/guest/operation"
	"github.com/directvol/directvol/tests/guest/remote"
)

func main() {
	var err error
	switch {
	case os.Getpid() == 1 && os.Args[0] == "/init":
		err = echoOnly()
	case os.Getpid() == 1 && slices.Contains(os.Args, remote.AsService):
		err = runAgent()
	case os.Getpid() == 1 && slices.Contains(os.Args, remote.OnDisk):
		err = switchRoot()
	case os.Getpid() == 1: // before the arguments: what else the kernel passes on as arguments is not ours
		err = becomeInit()
	case len(os.Args) == 2 && os.Args[1] == "serve":
		err = serve()
	case len(os.Args) == 2 && os.Args[1] == remote.BareEcho:
		err = bareEcho()
	case len(os.Args) == 2 && os.Args[1] == remote.FaultyAgent:
		err = serveFaultyAgent()
	case len(os.Args) == 3 && os.Args[1] == remote.OtherNamespace:
		err = keepMounts(os.Args[2])
	default:
		err = fmt.Errorf("usage: %s serve, bare-echo, faulty-agent or other-namespace FILE, or be the first process of a test guest", os.Args[0])
	}
	fmt.Fprintln(os.Stderr, "test-guest:", err)
	os.Exit(1)
}

// becomeInit starts the serving child and turns this process into /init. It returns only where there is none. Nothing is mounted yet, so the program is found by the
// path it has in the image, not through /proc.
func becomeInit() error {
	child, err := os.StartProcess("/test-guest", []string{"/test-guest", "serve"}, inheriting())
	if err != nil {
		// The agent shall run all the same: what its test then sees is this line and a port that nobody listens on.
		fmt.Fprintln(os.Stderr, "test-guest: start the server:", err)
	} else if err := child.Release(); err != nil {
		fmt.Fprintln(os.Stderr, "test-guest: let go of the server:", err)
	}
	if err := unix.Exec(remote.Agent, append([]string{remote.Agent}, os.Args[1:]...), os.Environ()); err != nil {
		return &os.PathError{Op: "exec", Path: remote.Agent, Err: err}
	}
	return nil
}

// inheriting gives a child this process's files.
func inheriting() *os.ProcAttr {
	return &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}}
}

// echoOnly is the init of a guest that does nothing else.
func echoOnly() error {
	if err := guestinit.LoadModules(modulelist.Path); err != nil {
		return err
	}
	if disk := os.Getenv(remote.FirstDisk); disk != "" {
		if err := mountFirst(disk); err != nil {
			return err
		}
	}
	echoes, err := listenEcho(&unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: remote.EchoPort})
	if err != nil {
		return fmt.Errorf("listen on vsock port %d: %w", remote.EchoPort, err)
	}
	return serveEcho(echoes)
}

// mountFirst mounts an ext4 with nothing around it. The disk is there as soon as its driver is loaded, and the agent's kernel has the rest of these system calls to make, too.
func mountFirst(disk string) error {
	const dev, target = "/dev", "/first"
	for _, dir := range []string{dev, target} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("devtmpfs", dev, "devtmpfs", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		return &os.PathError{Op: "mount", Path: dev, Err: err}
	}
	if err := unix.Mount(disk, target, "ext4", 0, ""); err != nil {
		return &os.PathError{Op: "mount", Path: disk, Err: err}
	}
	return nil
}

// serve listens on both ports once the kernel can do vsock, and serves for ever. Binding to any context ID needs no vsock device, which may come later still.
func serve() error {
	if err := awaitVsock(); err != nil {
		return err
	}
	echoes, err := listenEcho(&unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: remote.EchoPort})
	if err != nil {
		return fmt.Errorf("listen on vsock port %d: %w", remote.EchoPort, err)
	}
	operations, err := vsock.ListenContextID(unix.VMADDR_CID_ANY, remote.Port, nil)
	if err != nil {
		return fmt.Errorf("listen on vsock port %d: %w", remote.Port, err)
	}
	failed := make(chan error)
	go func() { failed <- fmt.Errorf("echo: %w", serveEcho(echoes)) }()
	go func() { failed <- fmt.Errorf("operations: %w", operation.Serve(operations)) }()
	return <-failed
}
