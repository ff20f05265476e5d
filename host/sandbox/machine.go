package sandbox

import (
	"context"

	"github.com/directvol/directvol/protocols/agentpb"
)

// Disk describes a disk to be attached to a machine.
type Disk struct {
	// ID names the disk in its machine, and is the serial number that the guest sees (DiskID).
	ID string
	// Path is the disk's store on the host: a file or a block device.
	Path     string
	ReadOnly bool
}

// Place is a disk's place in the guest: the driver and the source of a Storage.
type Place struct {
	Driver, Source string
	// Gone is closed when the machine no longer has the disk, for whatever reason. When the machine
	// ends, Gone is closed after Done. Each attachment has its own channel: the same disk attached
	// again has a new one.
	Gone <-chan struct{}
}

// Capabilities describes what a kind of machine can do.
type Capabilities struct {
	// Serial is true if the guest sees a disk's ID as its serial number.
	Serial bool
	// Grow is true if a disk can grow while it is in use.
	Grow bool
	// PowerButton is true if a guest can be asked to power off without its agent.
	PowerButton bool
}

// Machine is a virtual machine whose disks can be attached and detached while it runs. It is safe
// for concurrent use; a Sandbox makes one call at a time for each disk. No call lasts longer than
// its context.
type Machine interface {
	Capabilities() Capabilities
	// Attach attaches a disk to the machine and returns its place in the guest. It does not wait
	// until the guest sees the disk, which may take a moment. If the disk is attached already,
	// Attach changes nothing; if an earlier Attach failed or was given up, it finishes that one.
	// Detach removes what a failed Attach has left. ErrStoreHangs has the same meaning as for
	// Answers. The place belongs to the disk until a Detach has succeeded, even if the disk has
	// left by itself.
	Attach(ctx context.Context, disk Disk) (Place, error)
	// Detach asks the guest to release a disk, and returns when the disk is gone and its store is
	// closed. Nothing in the guest may use the disk; the guest's kernel does not check that.
	// Detaching an absent disk succeeds. If Detach fails, the guest may still release the disk
	// later, at any time. Two errors say more: after ErrKept the disk stays, and after ErrNotAsked
	// this Detach has not asked the guest, whatever else the error says.
	Detach(ctx context.Context, id string) error
	// Resize grows a disk to the given number of bytes. It refuses a smaller size (ErrWouldShrink).
	Resize(ctx context.Context, id string, bytes uint64) error
	// Answers returns nil when a disk's store has answered. Call it before Detach and Resize: a
	// machine that closes or grows a store that hangs may block, with all its disks. Some machines
	// block if any disk's store hangs. ErrStoreHangs means that a store hangs or may hang; the
	// method HangingDisk() string of an error below it names the disk, if that is another one. A
	// store that fails in another way, and an absent disk, count as success.
	Answers(ctx context.Context, id string) error
	// Disks returns the ids of the disks that were attached and are not known to be gone.
	Disks() []string

	// AgentAddress returns the address of the guest's agent, in the form of protocols/address.
	AgentAddress() string
	// VsockDone is closed when the guest can no longer be reached by vsock; VsockErr then returns
	// the reason.
	VsockDone() <-chan struct{}
	VsockErr() error

	// Reproduce returns shell lines that start the same machine by hand.
	Reproduce() string

	// Done is closed when the machine has ended and its stores are closed, except stores that do
	// not close because their disk does not answer.
	Done() <-chan struct{}
	// AwaitEnd waits until Done is closed. It returns nil if the guest has powered off cleanly, and
	// an error that wraps ErrEnded if the machine ended otherwise. The error also wraps ErrUnheard
	// if the way of ending is not known. If ctx ends first, AwaitEnd returns ctx's error.
	AwaitEnd(ctx context.Context) error
	// PressPower asks the guest to power off, without its agent.
	PressPower(ctx context.Context) error
	// Kill ends the machine at once, like pulling the plug. If ctx ends first, the error names what
	// is still running: a process that waits for a disk that does not answer.
	Kill(ctx context.Context) error
}

// Agent is the agent in a machine's guest. *agentclient.Client implements it and documents the
// calls. An error that does not match agentclient.ErrOutcomeUnknown is the agent's answer, or the
// call was not sent.
type Agent interface {
	Check(ctx context.Context) error
	CreateSandbox(ctx context.Context, request *agentpb.CreateSandboxRequest) error
	DestroySandbox(ctx context.Context) error
	CreateContainer(ctx context.Context, request *agentpb.CreateContainerRequest) error
	RemoveContainer(ctx context.Context, containerID string) error
	CheckReleased(ctx context.Context, driver, source, containerID string) error
	GetVolumeStats(ctx context.Context, guestPath string) (*agentpb.VolumeStatsResponse, error)
	CheckResizeVolume(ctx context.Context, guestPath string, size uint64) error
	ResizeVolume(ctx context.Context, guestPath string, size uint64) error
	Close() error
}
