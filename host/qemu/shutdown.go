package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/protocols/address"
)

// ErrEnded is the failure of a call on a VM whose QEMU has ended. The error includes how QEMU ended
// and its last output.
var ErrEnded = errors.New("QEMU has ended")

// Shutdown describes how a VM was shut down: QMP's SHUTDOWN event and QEMU's exit status.
type Shutdown struct {
	// Guest is true if the guest requested the shutdown.
	Guest bool
	// Reason is QEMU's reason (ShutdownCause): guest-shutdown for a power-off, guest-reset for a
	// reboot (which also ends the VM), guest-panic, host-qmp-quit, host-signal, and so on. It is
	// Unheard if QEMU exited with status 0 and its SHUTDOWN event was lost.
	Reason string
	// ExitCode is QEMU's exit status: 0 for success, -1 if a signal ended QEMU.
	ExitCode int
}

// closeTimeout is how long the end of a VM waits until its stores are closed. Closing a block
// device writes the kernel's cached data.
const closeTimeout = 2 * time.Second

// Unheard is the reason of a shutdown whose event was lost with the QMP connection. QEMU exits with
// status 0 for each of its shutdown reasons, a guest's power-off and reset among them, but never
// after a crash or a kill.
const Unheard = "unheard"

// Done returns a channel that is closed when the VM has ended and its files are removed. If a store
// does not close because its disk does not answer, Done is delayed by closeTimeout at most; the log
// names the store, and others cannot use it until it has closed.
func (vm *VM) Done() <-chan struct{} { return vm.done }

// AwaitShutdown waits until the VM has been shut down and QEMU has exited. It fails with ErrEnded
// if QEMU crashed or was killed.
func (vm *VM) AwaitShutdown(ctx context.Context) (Shutdown, error) {
	select {
	case <-vm.done:
	case <-ctx.Done():
		return Shutdown{}, fmt.Errorf("wait for the VM's shutdown: %w", ctx.Err())
	}
	if vm.shutdown == nil {
		return Shutdown{}, vm.ended()
	}
	return *vm.shutdown, nil
}

// Kill ends the VM at once, like pulling the plug, and returns when the VM has ended. If ctx ends
// first, the error names what is still running: a QEMU that waits for a disk that does not answer,
// and that ends when the disk answers.
func (vm *VM) Kill(ctx context.Context) error {
	vm.qemu.signalKill()
	select {
	case <-vm.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s was killed and has not ended: %w", vm.qemu.describe(), ctx.Err())
	}
}

// ended returns an error that describes how QEMU ended.
func (vm *VM) ended() error { return fmt.Errorf("%w: %s", ErrEnded, vm.qemu.state()) }

// supervise waits for the end of the VM and cleans up.
func (vm *VM) supervise() {
	defer vm.disks.allGone()
	defer close(vm.done)
	if vm.backend != nil {
		go vm.watchBackend()
	}
	var shutdown *Shutdown
	for event := range vm.events.Events() { // the loop ends with the connection
		if shutdown != nil {
			continue
		}
		var data struct {
			Guest  bool   `json:"guest"`
			Reason string `json:"reason"`
		}
		if err := json.Unmarshal(event.Data, &data); err != nil {
			vm.log.WithError(err).Warnf("QMP event %s: %s", event.Name, event.Data)
			continue
		}
		shutdown = &Shutdown{Guest: data.Guest, Reason: data.Reason}
	}
	<-vm.qemu.done
	status := vm.qemu.cmd.ProcessState.ExitCode()
	if shutdown == nil && status == 0 {
		shutdown = &Shutdown{Reason: Unheard}
	}
	if shutdown != nil {
		shutdown.ExitCode = status
		vm.shutdown = shutdown
	} else {
		vm.log.Warn(vm.ended())
	}
	vm.cleanUp()
}

// watchBackend logs an error if the vsock backend ends before QEMU.
func (vm *VM) watchBackend() {
	<-vm.backend.done
	select {
	case <-vm.qemu.done: // the backend ends with QEMU, and may be reaped first
	case <-time.After(reapTimeout):
		vm.log.Error(vm.VsockErr())
	}
}

// cleanUp ends the VM's processes and removes its files.
func (vm *VM) cleanUp() {
	for _, p := range []*process{vm.qemu, vm.backend} {
		if p != nil {
			if left := p.kill(reapTimeout); left != nil {
				vm.log.Error(left)
			}
		}
	}
	vm.releaseStores()
	if vm.qmp != nil {
		vm.qmp.Close()
	}
	if vm.monitor != nil {
		vm.monitor.Remove()
	}
	if vm.backend != nil {
		for _, name := range []string{vhostSocket, vsockSocket} { // a killed backend does not remove its sockets
			if err := address.ClaimUnix(vm.path(name)); err != nil {
				vm.log.WithError(err).Warn("a socket of the vsock backend was replaced by another file")
			}
		}
	}
	if vm.dir != nil {
		vm.dir.release(vm.log)
	}
}

// releaseStores closes the disks' stores once QEMU has ended and can write no more.
func (vm *VM) releaseStores() {
	if vm.qemu == nil {
		vm.endDisks(ErrEnded)
		return
	}
	if !vm.qemu.running() {
		vm.endDisks(vm.ended())
		return
	}
	go func() {
		<-vm.qemu.done
		vm.endDisks(vm.ended())
	}()
}

// endDisks closes the disks' stores, and logs those that do not close.
func (vm *VM) endDisks(why error) {
	for _, d := range vm.disks.end(why, closeTimeout) {
		vm.log.Errorf("the VM has ended, and the store of disk %s (%s) has not closed after %v: no other VM can use it until then", d.ID, d.Path, closeTimeout)
	}
}
