package qemu

import (
	"context"
	"errors"
	"fmt"

	"github.com/directvol/directvol/host/holders"
	"github.com/directvol/directvol/host/qmp"
	"github.com/directvol/directvol/host/sandbox"
	"github.com/directvol/directvol/host/trial"
)

// bootOptions are options for every sandbox's kernel: a quiet console, an end of the VM on panic,
// and no test of the timer interrupt. On a busy host an emulated timer interrupt can be later than
// the kernel waits (check_timer in Linux's arch/x86/kernel/apic/io_apic.c); the kernel would then
// panic. A KVM guest skips the test by itself.
const bootOptions = "console=ttyS0 loglevel=1 panic=-1 no_timer_check"

// Machine implements sandbox.Machine with a VM.
type Machine struct{ *VM }

var _ sandbox.Machine = Machine{}

// errNothingBoots is the refusal of a sandbox's VM in which no agent can start. Start would
// otherwise wait for the agent until the deadline.
var errNothingBoots = errors.New("no agent would start: set Kernel, and set Initrd to an image (directvol-rootfs makes both), or BootDisks with a root file system")

// StartMachine starts a VM for a sandbox. The kernel gets the options of every sandbox, followed by
// cfg.Append.
func StartMachine(ctx context.Context, cfg Config) (Machine, error) {
	if cfg.Initrd == "" && len(cfg.BootDisks) == 0 || cfg.Kernel == "" {
		return Machine{}, errNothingBoots
	}
	options := bootOptions + " " + sandbox.KernelOptions
	if cfg.Append != "" {
		options += " " + cfg.Append
	}
	cfg.Append = options
	vm, err := Start(ctx, cfg)
	return Machine{vm}, err
}

// Capabilities implements sandbox.Machine.
func (m Machine) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{Serial: true, Grow: true, PowerButton: true}
}

// Attach implements sandbox.Machine.
func (m Machine) Attach(ctx context.Context, disk sandbox.Disk) (sandbox.Place, error) {
	attached, err := m.AttachDisk(ctx, Disk{ID: disk.ID, Path: disk.Path, ReadOnly: disk.ReadOnly, Serial: disk.ID})
	if err != nil {
		return sandbox.Place{}, typed(err)
	}
	return sandbox.Place{Driver: "blk", Source: attached.PCIPath, Gone: attached.Gone}, nil
}

// Answers implements sandbox.Machine.
func (m Machine) Answers(ctx context.Context, id string) error {
	d := m.disks.find(id)
	if d == nil {
		return nil
	}
	if err := m.answers(ctx, d); err != nil {
		return typed(err)
	}
	return typed(m.awaitRequests(ctx, d))
}

// Detach implements sandbox.Machine.
func (m Machine) Detach(ctx context.Context, id string) error { return typed(m.DetachDisk(ctx, id)) }

// Resize implements sandbox.Machine.
func (m Machine) Resize(ctx context.Context, id string, bytes uint64) error {
	return typed(m.ResizeDisk(ctx, id, bytes))
}

// Disks implements sandbox.Machine.
func (m Machine) Disks() []string { return m.disks.hotplugged() }

// PressPower implements sandbox.Machine, by ACPI's power button.
func (m Machine) PressPower(ctx context.Context) error {
	return m.execute(ctx, "system_powerdown", nil, nil)
}

// orderly is the Shutdown of a VM whose guest powered off.
var orderly = Shutdown{Guest: true, Reason: "guest-shutdown", ExitCode: 0}

// AwaitEnd implements sandbox.Machine.
func (m Machine) AwaitEnd(ctx context.Context) error {
	switch end, err := m.AwaitShutdown(ctx); {
	case err != nil:
		return typed(err)
	case end.Reason == Unheard:
		return fmt.Errorf("%w, and QEMU exited with 0, but %w or reset: the QMP connection was lost", sandbox.ErrEnded, sandbox.ErrUnheard)
	case end != orderly:
		return fmt.Errorf("%w, but not by its guest's power-off: reason %s, by the guest %v, QEMU exit code %d", sandbox.ErrEnded, end.Reason, end.Guest, end.ExitCode)
	}
	return nil
}

// meanings maps this package's errors to those of host/sandbox.
var meanings = []struct{ of, is error }{
	{ErrEnded, sandbox.ErrEnded}, {ErrShrink, sandbox.ErrWouldShrink}, {ErrCutOff, sandbox.ErrInfeasible}, {ErrAttached, sandbox.ErrBusy}, {ErrNoDisk, sandbox.ErrNotFound},
	{ErrDiskHangs, sandbox.ErrStoreHangs}, {trial.ErrHangs, sandbox.ErrStoreHangs}, {trial.ErrUntried, sandbox.ErrStoreHangs},
	{ErrKept, sandbox.ErrKept}, {ErrHotplugHeld, sandbox.ErrHotplugHeld}, {errNotAsked, sandbox.ErrNotAsked},
	{qmp.ErrOutcomeUnknown, sandbox.ErrOutcomeUnknown},
}

// meant is an error that also matches errors of host/sandbox. Its text is unchanged.
type meant struct {
	error
	are []error
}

func (m meant) Unwrap() []error { return append([]error{m.error}, m.are...) }

// typed adds to an error all that it means: a disk may hang while another one is not released.
func typed(err error) error {
	var are []error
	for _, meaning := range meanings {
		if errors.Is(err, meaning.of) {
			are = append(are, meaning.is)
		}
	}
	if _, inUse := errors.AsType[*holders.InUseError](err); inUse {
		are = append(are, sandbox.ErrBusy)
	}
	if len(are) == 0 {
		return err
	}
	return meant{err, are}
}
