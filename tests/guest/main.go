// Command guest is the program inside test guests. It serves the operations of tests/guest/remote
// and an echo over vsock. Only test images contain it.
//
// A test image has the program as /test-guest, and its kernel boots with rdinit=/test-guest. As PID
// 1 the program starts itself again as a child, which serves, and then becomes /init, the agent,
// which has PID 1's duties. Child and agent do not know each other, and the tested agent is the
// shipped one. With agent_as_service the program stays PID 1 and runs the agent as a service; with
// root_on_disk it switches to the init of another system.
//
// As the /init of an image, the program only loads the image's modules, mounts the disk that
// first_disk= on the kernel command line names, and serves the echo. That is the least that a guest
// can do before it answers, and the baseline of the boot time. With the argument bare-echo the
// program is the bare echo, the baseline of round trips.
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
	case os.Getpid() == 1: // checked before the arguments, because the kernel also passes other arguments
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

// becomeInit starts the serving child and turns this process into /init. It returns only if there
// is no /init. Nothing is mounted yet, so it finds its own program by the path in the image, not
// through /proc.
func becomeInit() error {
	child, err := os.StartProcess("/test-guest", []string{"/test-guest", "serve"}, inheriting())
	if err != nil {
		// The agent must run anyway. The test then sees this line and a port on which nobody
		// listens.
		fmt.Fprintln(os.Stderr, "test-guest: start the server:", err)
	} else if err := child.Release(); err != nil {
		fmt.Fprintln(os.Stderr, "test-guest: release the server:", err)
	}
	if err := unix.Exec(remote.Agent, append([]string{remote.Agent}, os.Args[1:]...), os.Environ()); err != nil {
		return &os.PathError{Op: "exec", Path: remote.Agent, Err: err}
	}
	return nil
}

// inheriting makes a child inherit this process's files.
func inheriting() *os.ProcAttr {
	return &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}}
}

// echoOnly is the init of a guest that serves only the echo.
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

// mountFirst mounts an ext4 with as few system calls as possible. The disk appears as soon as its
// driver is loaded. A guest with the agent makes the same system calls.
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

// serve listens on both ports once the kernel supports vsock, and serves for ever. Binding to any
// context ID needs no vsock device, which may appear later.
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
