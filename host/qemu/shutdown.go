package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/directvol/directvol/protocols/address"
)

// ErrEnded is the failure of a call on a VM whose QEMU has ended; the error says how, and what QEMU said last.
var ErrEnded = errors.New("QEMU has ended")

// Shutdown is how a VM ended that was shut down: QMP's SHUTDOWN event and QEMU's exit.
type Shutdown struct {
	// Guest says whether the guest asked for it.
	Guest bool
	// Reason is QEMU's (ShutdownCause): guest-shutdown for a power-off, guest-reset for a reboot, which ends the VM too,
	// guest-panic, host-qmp-quit, host-signal, …. It is Unheard where QEMU ended in order and its last words were lost.
	Reason string
	// ExitCode is QEMU's exit status, 0 where all went well, -1 where a signal ended it.
	ExitCode int
}

// closeTimeout is how long a VM's end waits for its stores to close: a block device writes then what the kernel has of it.
const closeTimeout = 2 * time.Second

// Unheard is the reason of a shutdown whose event was lost with the QMP connection: QEMU exits with status 0 after each of its
// reasons, a guest's power-off and reset among them, and never where it crashed or was killed.
const Unheard = "unheard"

// Done returns a channel that is closed when the VM has ended and what it used is removed. A store that does not close, as its disk
// does not answer, holds it up for closeTimeout at most: it is named in the log, and refused to others until it has closed.
func (vm *VM) Done() <-chan struct{} { return vm.done }

// AwaitShutdown waits until the VM has been shut down and QEMU has exited. It is an error (ErrEnded) if QEMU ended without being
// shut down: it crashed, or was killed.
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

// Kill ends the VM at once, as pulling the plug does, and returns when it has ended. Where ctx ends first the error says what is
// left running: QEMU, which waits for a disk that does not answer, and ends when that does.
func (vm *VM) Kill(ctx context.Context) error {
	vm.qemu.signalKill()
	select {
	case <-vm.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s was killed and has not ended: %w", vm.qemu.describe(), ctx.Err())
	}
}

// ended says how QEMU ended.
func (vm *VM) ended() error { return fmt.Errorf("%w: %s", ErrEnded, vm.qemu.state()) }

// supervise waits for the end of the VM.
func (vm *VM) supervise() {
	defer vm.disks.allGone()
	defer close(vm.done)
	if vm.backend != nil {
		go vm.watchBackend()
	}
	var shutdown *Shutdown
	for event := range vm.events.Events() { // ends with the connection
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

// watchBackend tells of a backend that ends before QEMU.
func (vm *VM) watchBackend() {
	<-vm.backend.done
	select {
	case <-vm.qemu.done: // the backend follows QEMU, and may be the first to be reaped
	case <-time.After(reapTimeout):
		vm.log.Error(vm.VsockErr())
	}
}

// cleanUp ends what still runs and removes what was made.
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
		for _, name := range []string{vhostSocket, vsockSocket} { // a backend that was killed has left them
			if err := address.ClaimUnix(vm.path(name)); err != nil {
				vm.log.WithError(err).Warn("a socket of the vsock backend's has become another file")
			}
		}
	}
	if vm.dir != nil {
		vm.dir.release(vm.log)
	}
}

// releaseStores lets go of the disks' stores when QEMU has ended, and writes nothing any more.
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

// endDisks lets go of the disks' stores, and says which stay.
func (vm *VM) endDisks(why error) {
	for _, d := range vm.disks.end(why, closeTimeout) {
		vm.log.Errorf("the VM has ended, and the store of disk %s (%s) has not closed after %v: it is nobody else's until it has", d.ID, d.Path, closeTimeout)
	}
}
