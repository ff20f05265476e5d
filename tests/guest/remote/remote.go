// Package remote lets a test act inside a test guest: it has the messages that tests/guest answers,
// and the client that sends them.
//
// The protocol is one operation per connection. Both sides send lines of JSON, each at most MaxLine
// bytes: the client sends one [Request], the guest any number of [Reply], the last one with Done
// set. Any further data from the client, or the end of the connection, asks the operation to stop.
// Bytes are encoded as base64, as encoding/json does.
//
// The client reaches the guest through a [Dial] function, so it does not depend on vsock. It trusts
// no length and no order from the guest, because a test guest that was broken on purpose must not
// break the test.
package remote

import (
	"encoding/json"
	"fmt"
	"syscall"
)

// The vsock ports on which a test guest listens.
const (
	Port     uint32 = 2048 // operations, this package's protocol
	EchoPort uint32 = 2049 // every byte comes back unchanged

	// BareEchoPort is an echo too, from a process that does nothing else, and that has to be
	// started: see [BareEcho]. It is the baseline of every round trip.
	BareEchoPort uint32 = 2050

	// FaultyAgentPort is the port of an agent with a fault; see [FaultyAgent].
	FaultyAgentPort uint32 = 2051
)

// AsService is the kernel option that makes a test guest run the agent as a service: PID 1 is then
// another init, which starts the agent again whenever it has ended.
const AsService = "agent_as_service"

// OnDisk is the kernel option that makes a test guest switch to the root file system on its first
// disk, an ext4, and to the /sbin/init there.
const OnDisk = "root_on_disk"

// Agent is the agent's program in a test guest.
const Agent = "/init"

// FaultyAgent is an argument of test-guest, for an OpExec. It runs an agent whose GetVolumeStats
// panics: the agent's own packages, but wired wrongly. No input is known that makes the real agent
// panic, and tests must see how it handles a panic.
const FaultyAgent = "faulty-agent"

// OtherNamespace is an argument of test-guest, followed by a file's name, for an OpExec. It keeps
// all mounts in a separate mount namespace until it is killed, and makes the file when it has them.
const OtherNamespace = "other-namespace"

// BareEcho is an argument of test-guest, for an OpExec. It runs the process that listens on
// BareEchoPort. The OpExec must set the environment GODEBUG=asyncpreemptoff=1, because Go's runtime
// otherwise signals its threads a hundred times a second. The process serves BareEchoes connections
// at once; more connections wait.
const (
	BareEcho   = "bare-echo"
	BareEchoes = 16
)

// FirstDisk is the kernel parameter, and therefore the environment variable of init, with the
// device of an ext4 that the minimal init mounts before it answers.
const FirstDisk = "first_disk"

// Bounds of the protocol, in bytes. The guest refuses larger values.
const (
	MaxLine   = 8 << 20  // one line of JSON
	MaxData   = 4 << 20  // data that one operation reads from or writes to a file, or passes to a program
	MaxOutput = 1 << 20  // the kept part of each output of a program
	MaxBlock  = 16 << 20 // a block of the checksummed writer
)

// DefaultBlock is the checksummed writer's block size if none is given.
const DefaultBlock = 1 << 20

// The operations, by their names in a Request.
const (
	OpExec         = "exec"
	OpReadFile     = "read-file"
	OpWriteFile    = "write-file"
	OpStat         = "stat"
	OpStatFS       = "statfs"
	OpDeviceSize   = "blockdev-size"
	OpDiskOffset   = "disk-offset"
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
	OpClock        = "clock"
	OpStop         = "stop" // only as a second line, to end a running operation
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

// Error is a failure in the guest. It unwraps to the guest's errno, so errors.Is(err, syscall.EIO)
// works across the wire.
type Error struct {
	Message string        `json:"message"`
	Errno   syscall.Errno `json:"errno,omitempty"` // 0 if no system call failed
	Index   *uint64       `json:"index,omitempty"` // the block that failed, of OpWriteBlocks and OpVerifyBlocks
	// UnixMilliseconds is the time of a block's failure, by the guest's clock.
	UnixMilliseconds int64 `json:"unix_milliseconds,omitempty"`
}

// Error returns the place and the message of the failure.
func (e *Error) Error() string {
	if e.Index != nil {
		return fmt.Sprintf("in the guest, at block %d: %s", *e.Index, e.Message)
	}
	return "in the guest: " + e.Message
}

// Unwrap returns the errno, or nil if no system call failed.
func (e *Error) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return e.Errno
}
