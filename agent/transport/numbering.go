package transport

import (
	"encoding/binary"
	"errors"
	"math"
	"sync"
)

// numbering gives the calls of a connection that go to a server new stream ids, their numbers,
// which increase from call to call. A peer may send its own ids in any order, but ttrpc's server in
// Go refuses an id below an earlier one. The asynchronous client of ttrpc in Rust, which Kata's
// runtime-rs uses, takes an id before it queues the call: of two calls at once, it may send the
// higher id first.
//
//	a request with the id of a call in a server   is refused: the two answers would look alike
//	an id that comes again after the answer       is a new call
//	an answer to no call                          is dropped
type numbering struct {
	mu    sync.Mutex
	begun uint32            // calls that got a number
	ids   map[uint32]uint32 // the peer's ids of the calls in servers, by number
}

var errNumbers = errors.New("all stream ids of this connection are used up")

// begin returns the number of a new call. After 2^31 calls there is no odd number left: begin
// fails, and the connection must end.
func (n *numbering) begin(id uint32) (number uint32, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.begun > math.MaxUint32/2 {
		return 0, errNumbers
	}
	if n.ids == nil {
		n.ids = map[uint32]uint32{}
	}
	number = 2*n.begun + 1
	n.begun++
	n.ids[number] = id
	return number, nil
}

// inUse reports whether a call in a server has the peer's id.
func (n *numbering) inUse(id uint32) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, used := range n.ids {
		if used == id {
			return true
		}
	}
	return false
}

// idOf returns the peer's id of a call in a server. If the call ends, its number and its id are
// free from now on. ok is false if no call has the number.
func (n *numbering) idOf(number uint32, ends bool) (id uint32, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	id, ok = n.ids[number]
	if ends {
		delete(n.ids, number)
	}
	return id, ok
}

// setStream replaces the stream id in a frame's header.
func setStream(frame []byte, id uint32) { binary.BigEndian.PutUint32(frame[4:], id) }
