package sandbox

import (
	"context"

	"github.com/directvol/directvol/protocols/agentpb"
)

// Disk is what a machine is to be given.
type Disk struct {
	// ID names the disk in its machine, and is the serial that the guest sees (DiskID).
	ID string
	// Path is its store on the host: a file or a block device.
	Path     string
	ReadOnly bool
}

// Place is where a guest finds a disk: the driver and the source of a Storage.
type Place struct {
	Driver, Source string
	// Gone is closed when the machine has the disk no more, whoever took it, and where the
	// machine has ended after its Done. It is this attachment's: the same disk attached again
	// has another one.
	Gone <-chan struct{}
}

// Capabilities are what a kind of machine can do.
type Capabilities struct {
	// Serial says that the guest sees a disk's ID as its serial.
	Serial bool
	// Grow says that a disk can grow while it is in use.
	Grow bool
	// PowerButton says that a guest can be asked to power off without its agent.
	PowerButton bool
}

// Machine is a virtual machine whose disks come and go while it runs. It is safe for
// concurrent use; a Sandbox makes one call at a time for each disk. No call lasts longer
// than its context.
type Machine interface {
	Capabilities() Capabilities
	// Attach gives the machine a disk and returns where its guest will find it; the guest
	// may need a moment. Called again with the same disk, also after an Attach that failed
	// or was given up, it goes on from there, and changes nothing where the disk is there.
	// What a failed one has left Detach takes away. ErrStoreHangs is that of Answers. The place is no other disk's before a
	// Detach has succeeded, also where the disk has left by itself.
	Attach(ctx context.Context, disk Disk) (Place, error)
	// Detach has the guest let go of a disk and returns when the disk is gone and its store
	// closed; nothing in the guest may use it, which a guest's kernel does not check. A disk
	// that is not there is success. After a failure the disk may leave at any time, until a
	// Detach succeeds; but ErrKept says that it stays, and ErrHotplugHeld that this Detach
	// has not asked the guest.
	Detach(ctx context.Context, id string) error
	// Resize grows a disk to so many bytes. A smaller size is refused (ErrWouldShrink).
	Resize(ctx context.Context, id string, bytes uint64) error
	// Answers returns when a disk's store has answered, as only then it may be let go of or
	// grown: a machine that closes a store that hangs, or makes it longer, may stand still with
	// all its disks. One kind of machine does so for any disk's store. ErrStoreHangs says that
	// one hangs, or may; it wraps HangingDisk() string where that is another disk's. A store
	// that fails otherwise, and a disk that is not there, are success.
	Answers(ctx context.Context, id string) error
	// Disks returns the ids of the disks that came by Attach and are not gone for sure.
	Disks() []string

	// AgentAddress is where the guest's agent is reached, for protocols/address.
	AgentAddress() string
	// VsockDone is closed when the guest can be reached no more, and VsockErr says why then.
	VsockDone() <-chan struct{}
	VsockErr() error

	// Reproduce returns lines for a shell that start the same machine by hand.
	Reproduce() string

	// Done is closed when the machine has ended and holds no store any more, but one that
	// does not close, as its disk does not answer.
	Done() <-chan struct{}
	// AwaitEnd waits until then. It returns nil where the guest has powered off in order, an
	// error that wraps ErrEnded where the machine ended otherwise, ErrUnheard too where that is
	// not known, and else ctx's.
	AwaitEnd(ctx context.Context) error
	// PressPower asks the guest to power off, without its agent.
	PressPower(ctx context.Context) error
	// Kill ends the machine at once, as pulling the plug does. An error says what is left
	// running when ctx ends: a process waits for a disk that does not answer.
	Kill(ctx context.Context) error
}

// Agent is the agent in a machine's guest: *agentclient.Client, which says what its calls
// do. An error without agentclient.ErrOutcomeUnknown is the agent's answer, or the call
// was not sent.
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
