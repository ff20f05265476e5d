package transport

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/gogocodec"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

const (
	// share is which part of the guest's memory all connections may take: half of it
	// for being open, half for their calls.
	share = 8

	// connBytes is counted for an open connection: its thread, its goroutines, their
	// buffers, the kernel's, and ownBytes.
	connBytes = 128 << 10

	// heapBytes is how much of connBytes the collector can give back.
	heapBytes = 32 << 10

	// maxConns is how many connections are open at once however much memory there is:
	// each has a thread that waits for it. A host has one or two. minConns is for a
	// guest with little.
	maxConns, minConns = 256, 32

	// socketBytes is what the kernel keeps of a connection that is not read.
	socketBytes = 64 << 10

	// callBytes is counted for a call beside its frame: the goroutines that answer it.
	// copies is how often its frame is in memory: as it was read, as ttrpc's request,
	// and as the message, which takes more where it is made to.
	callBytes = 16 << 10
	copies    = 2 + gogocodec.MaxGrowth

	// ownBytes is how much of calls each connection can have whatever others do: a
	// few small ones.
	ownBytes = 48 << 10

	// largest is what the largest call takes, and least what is lent however little
	// memory there is: one of these, and others beside it.
	largest = callBytes + copies*ttrpcframe.MaxLength
	least   = largest + 4<<20
)

// bounds are what connections may take of the guest's memory.
type bounds struct {
	conns     int
	lent      int64 // to all connections, in bytes, beside what each has of its own
	lentToOne int64
}

// boundsOf divides a guest's memory, in bytes.
func boundsOf(memory int64) bounds {
	half := memory / share / 2
	return bounds{
		conns:     int(min(max(half/connBytes, minConns), maxConns)),
		lent:      max(half, least),
		lentToOne: max(half/2, least),
	}
}

// guestMemory is how much there is, in bytes (sysinfo(2)).
func guestMemory() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("find out how much memory there is: %w", err)
	}
	return int64(info.Totalram) * int64(info.Unit), nil
}

// costOf is what a call takes whose frame has so many bytes behind its header. One
// that is too long ttrpc's server passes over, and keeps nothing of it.
func costOf(length uint32) int64 {
	if length > ttrpcframe.MaxLength {
		return callBytes
	}
	return callBytes + copies*int64(length)
}
