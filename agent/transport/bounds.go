package transport

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/gogocodec"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

const (
	// share is the fraction of the guest's memory, as 1/share, that all connections may take: half
	// of that for being open, half for their calls.
	share = 8

	// connBytes is counted for an open connection: its thread, its goroutines, their buffers, the
	// kernel's buffers, and ownBytes.
	connBytes = 128 << 10

	// heapBytes is the part of connBytes that the garbage collector can free.
	heapBytes = 32 << 10

	// maxConns is how many connections may be open at once, however much memory there is, because
	// each has a waiting thread. A host opens one or two. minConns is for a guest with little
	// memory.
	maxConns, minConns = 256, 32

	// socketBytes is how much the kernel buffers for a connection that is not read.
	socketBytes = 64 << 10

	// callBytes is counted for a call in addition to its frame: the goroutines that answer it.
	// copies is how often its frame is in memory: as it was read, as ttrpc's request, and as the
	// decoded message, which may be several times larger.
	callBytes = 16 << 10
	copies    = 2 + gogocodec.MaxGrowth

	// ownBytes is how much memory for calls each connection always has: enough for a few small
	// ones.
	ownBytes = 48 << 10

	// largest is what the largest call takes. least is the minimum that is lent: enough for one
	// such call and a few others.
	largest = callBytes + copies*ttrpcframe.MaxLength
	least   = largest + 4<<20
)

// bounds are how much of the guest's memory connections may take.
type bounds struct {
	conns     int
	lent      int64 // to all connections, in bytes, in addition to what each has of its own
	lentToOne int64
}

// boundsOf computes the bounds for a guest's memory, in bytes.
func boundsOf(memory int64) bounds {
	half := memory / share / 2
	return bounds{
		conns:     int(min(max(half/connBytes, minConns), maxConns)),
		lent:      max(half, least),
		lentToOne: max(half/2, least),
	}
}

// guestMemory returns the size of the guest's memory in bytes (sysinfo(2)).
func guestMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("find out how much memory there is: %w", err)
	}
	return int64(info.Totalram) * int64(info.Unit), nil
}

// costOf returns what a call takes whose frame has length bytes after its header. ttrpc's server
// skips a frame that is too long, and keeps nothing of it.
func costOf(length uint32) int64 {
	if length > ttrpcframe.MaxLength {
		return callBytes
	}
	return callBytes + copies*int64(length)
}
