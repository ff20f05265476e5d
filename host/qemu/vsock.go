package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/protocols/agentpb"
)

// vsockTransport describes how bytes get between the host's processes and the guest's.
type vsockTransport struct {
	inKernel bool   // by the host kernel's vhost-vsock; otherwise by a backend process
	reason   string // why this transport was chosen
}

func (t vsockTransport) name() string {
	if t.inKernel {
		return "the kernel"
	}
	return "a backend process"
}

// detectVsock looks for the kernel's backend below root.
func detectVsock(root string) vsockTransport {
	device := filepath.Join(root, "dev/vhost-vsock")
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return vsockTransport{false, err.Error()}
	}
	f.Close()
	return vsockTransport{true, device + " opens"}
}

// vsockArguments returns QEMU's arguments for the guest's vsock device.
func (vm *VM) vsockArguments() []string {
	if vm.vsock.inKernel {
		return []string{"-device", fmt.Sprintf("vhost-vsock-pci,bus=pcie.0,addr=%#x,guest-cid=%d", vsockSlot, vm.cfg.GuestCID)}
	}
	return []string{
		"-chardev", "socket,id=vsock,path=" + escape(vm.path(vhostSocket)),
		"-device", fmt.Sprintf("vhost-user-vsock-pci,bus=pcie.0,addr=%#x,chardev=vsock", vsockSlot),
	}
}

// AgentAddress returns the address of the guest's agent, in the form of protocols/address.
func (vm *VM) AgentAddress() string { return vm.GuestAddress(agentpb.Port) }

// GuestAddress returns the address of a vsock port of the guest, in the form of protocols/address.
func (vm *VM) GuestAddress(port uint32) string {
	if vm.vsock.inKernel {
		return address.Address{Scheme: address.VSock, CID: vm.cfg.GuestCID, Port: port}.String()
	}
	return address.Address{Scheme: address.HVSock, Path: vm.path(vsockSocket), Port: port}.String()
}

// backendCommand returns the command that starts the vsock backend.
func (vm *VM) backendCommand() *exec.Cmd {
	return exec.Command(vm.cfg.Directvol, "vhost-vsock", "--socket", vm.path(vhostSocket), "--uds-path", vm.path(vsockSocket),
		"--guest-cid", strconv.FormatUint(uint64(vm.cfg.GuestCID), 10))
}

// startBackend starts the vsock backend and waits until QEMU can connect to it.
func (vm *VM) startBackend(ctx context.Context) error {
	if vm.cfg.Directvol == "" {
		return fmt.Errorf("the host's kernel has no vsock (%s) and no backend program is set: set Directvol", vm.vsock.reason)
	}
	for _, name := range []string{vhostSocket, vsockSocket} {
		if err := address.ClaimUnix(vm.path(name)); err != nil {
			return err
		}
	}
	watch, err := watchDir(vm.cfg.Dir)
	if err != nil {
		return err
	}
	defer watch.Close()
	if vm.backend, err = startProcess(ctx, "the vsock backend", vm.backendCommand()); err != nil {
		return err
	}
	// The backend's socket appears under its name only when the backend listens on it.
	return awaitFile(ctx, watch, vm.path(vhostSocket), vm.backend)
}

// watchDir returns a file that becomes readable whenever a name is added to a directory
// (inotify(7)).
func watchDir(dir string) (*os.File, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify_init1: %w", err)
	}
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVED_TO); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watch directory %s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), "inotify"), nil
}

// awaitFile waits until a process has made the file at path, in the watched directory. It fails if
// the process ends first.
func awaitFile(ctx context.Context, watch *os.File, path string, maker *process) error {
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-maker.done:
		case <-waiting.Done():
		}
		watch.SetReadDeadline(time.Unix(1, 0))
	}()
	names := make([]byte, 4096)
	for {
		if _, err := os.Lstat(path); err == nil {
			return nil
		}
		if _, err := watch.Read(names); err == nil {
			continue
		} else if !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("wait for %s: %w", path, err)
		}
		if !maker.running() {
			return fmt.Errorf("%s ended before it was ready: %s", maker.name, maker.state())
		}
		return fmt.Errorf("wait for %s to make %s: %w", maker.name, path, ctx.Err())
	}
}

// VsockDone returns a channel that is closed when the guest can no longer be reached by vsock: when
// the VM ends, or when the backend process dies. QEMU cannot connect to a new backend, so the VM
// then stays without vsock; its disks keep working.
func (vm *VM) VsockDone() <-chan struct{} {
	if vm.backend == nil {
		return vm.qemu.done
	}
	return vm.backend.done
}

// VsockErr returns why vsock has ended, or nil if it has not. A backend ends with its QEMU, and may
// be reaped first.
func (vm *VM) VsockErr() error {
	switch {
	case !vm.qemu.running():
		return vm.ended()
	case vm.backend != nil && !vm.backend.running():
		return fmt.Errorf("%s has ended, so this VM has no vsock until it is restarted; its disks keep working: %s", vm.backend.name, vm.backend.state())
	default:
		return nil
	}
}
