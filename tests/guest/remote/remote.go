// Package remote is how a test acts inside a test guest: the messages that tests/guest answers, and the client that sends them.
//
// The protocol is one operation a connection. Both sides send lines of JSON, each at most MaxLine bytes: the client one [Request], the guest any number of [Reply], the
// last of them with Done set. Whatever the client sends after its request, and the end of the connection, ask the operation to stop. Bytes travel as base64, as
// encoding/json writes them.
//
// The client reaches the guest through a [Dial] function, so that it knows nothing of vsock. It believes the guest no length and no order: a test guest that was
// broken on purpose must not take the test down with it.
package remote

import (
	"encoding/json"
	"fmt"
	"syscall"
)

// The vsock ports a test guest listens on.
const (
	Port     uint32 = 2048 // operations, this package's protocol
	EchoPort uint32 = 2049 // every byte comes back unchanged

	// BareEchoPort is the same from a process that does nothing else, and is only there while that runs: the floor under any round trip.
	BareEchoPort uint32 = 2050

	// FaultyAgentPort is where an agent listens that has a fault; see [FaultyAgent].
	FaultyAgentPort uint32 = 2051
)

// AsService is what a test guest's kernel is told to have the agent run as a service: PID 1 is then another init, which starts the agent anew whenever it ends.
const AsService = "agent_as_service"

// OnDisk is what a test guest's kernel is told to go on with the root file system on its first disk, an ext4, and the /sbin/init there.
const OnDisk = "root_on_disk"

// Agent is the agent's program in a test guest.
const Agent = "/init"

// FaultyAgent is test-guest's argument to be an agent whose GetVolumeStats panics, for an OpExec: the agent's own packages, put together wrongly. No input is known that
// makes the agent panic, and what it does then has to be seen.
const FaultyAgent = "faulty-agent"

// OtherNamespace is test-guest's argument, before a file's name, to keep all mounts in a mount namespace of its own, for an OpExec: until it is killed. When it has them it
// makes the file.
const OtherNamespace = "other-namespace"

// BareEcho is test-guest's argument to be that process, for an OpExec with the environment GODEBUG=asyncpreemptoff=1, without which Go's runtime signals its threads a hundred
// times a second. It serves BareEchoes connections at once; more of them wait.
const (
	BareEcho   = "bare-echo"
	BareEchoes = 16
)

// FirstDisk names the kernel's parameter, and so the environment variable of its init, that has the least init mount an ext4 from that device before it answers.
const FirstDisk = "first_disk"

// Bounds of the protocol, in bytes. The guest refuses what is above them.
const (
	MaxLine   = 8 << 20  // one line of JSON
	MaxData   = 4 << 20  // what one operation reads from or writes to a file, or feeds to a program
	MaxOutput = 1 << 20  // what is kept of each of a program's outputs
	MaxBlock  = 16 << 20 // a block of the checksummed writer
)

// DefaultBlock is the checksummed writer's block size where none is given.
const DefaultBlock = 1 << 20

// The operations, by the name they have in a Request.
const (
	OpExec         = "exec"
	OpReadFile     = "read-file"
	OpWriteFile    = "write-file"
	OpStat         = "stat"
	OpStatFS       = "statfs"
	OpDeviceSize   = "blockdev-size"
	OpMkdir        = "mkdir"
	OpMount        = "mount"
	OpUnmount      = "umount"
	OpShutdownFS   = "shutdown-fs"
	OpGrowFS       = "grow-fs"
	OpFreezeFS     = "freeze-fs"
	OpSync         = "sync"
	OpWriteBlocks  = "write-blocks"
	OpVerifyBlocks = "verify-blocks"
	OpDialVsock    = "dial-vsock"
	OpSignal       = "signal"
	OpThreads      = "threads"
	OpStop         = "stop" // only as a second line, to end an operation that runs
)

// Request begins an operation.
type Request struct {
	Op   string          `json:"op"`
	Args json.RawMessage `json:"args,omitempty"`
}

// Reply is one line of an answer. Error is only set together with Done.
type Reply struct {
	Result json.RawMessage `json:"result,omitempty"`
	Error  *Error          `json:"error,omitempty"`
	Done   bool            `json:"done,omitempty"`
}

// Error is what went wrong in the guest. It unwraps to the guest's errno, so errors.Is(err, syscall.EIO) works across the wire.
type Error struct {
	Message string        `json:"message"`
	Errno   syscall.Errno `json:"errno,omitempty"` // 0 where no system call failed
	Index   *uint64       `json:"index,omitempty"` // the block that failed, of OpWriteBlocks and OpVerifyBlocks
}

// Error says where it went wrong, and what.
func (e *Error) Error() string {
	if e.Index != nil {
		return fmt.Sprintf("in the guest, at block %d: %s", *e.Index, e.Message)
	}
	return "in the guest: " + e.Message
}

// Unwrap returns the errno, or nil where no system call failed.
func (e *Error) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return e.Errno
}
