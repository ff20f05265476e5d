// Package arrival makes calls begin in the order in which their frames were read. ttrpc's server
// (github.com/containerd/ttrpc, services.go) gives each call a goroutine, and these run in any
// order: a call whose caller has given up could overtake the opposite call that the same caller
// made afterwards.
//
// When the frame of a call that changes who holds which storage is complete, the transport takes a
// ticket for the call, and adds the ticket to the call's metadata. The call waits until all calls
// with earlier tickets have joined the queues in which they wait; joining does not wait for a disk.
// Then the call joins its own queue and reports that by Joined.
//
//	the call is answered, joined or not   its ticket is given back
//	its connection ends before it began   the same; it does nothing when it begins
//	it has no ticket                      it begins when it comes
//
// The order is that of reading across connections, too. A caller that makes a new connection ends
// the old one first. The transport drops a frame that it has read if the peer has hung up by then,
// so no call of the old connection comes after one of the new connection. This holds if the way to
// the guest shows the end of one connection before the bytes of a later one, as virtio's vsock
// does. Two callers that use separate connections at the same time have no order except that of
// reading.
package arrival

import (
	"context"
	"strconv"
	"sync"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/agent/deadline"
	"github.com/directvol/directvol/agent/turns"
	"github.com/directvol/directvol/protocols/ttrpcframe"
)

// Key is the metadata key of a call's ticket, used inside the agent.
const Key = "directvol-ticket"

// Order is the order of calls. The zero value is ready.
type Order struct {
	// Of reports whether a call changes who holds which storage, and so has an order. It must be
	// set before the first call; nil means that no call has an order.
	Of func(*ttrpcframe.Request) bool

	line turns.Turns // of calls that have not joined yet

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]*turns.Place // by ticket, for calls that have not begun
}

// Has reports whether a call has an order.
func (o *Order) Has(r *ttrpcframe.Request) bool { return o.Of != nil && o.Of(r) }

// Take returns the next ticket, which is greater than 0. The caller gives it back when the call is
// answered, or will never be.
func (o *Order) Take() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last++
	if o.waiting == nil {
		o.waiting = map[uint64]*turns.Place{}
	}
	o.waiting[o.last] = o.line.Join("")
	return o.last
}

// GiveBack ends a ticket whose call has not begun. It ignores other tickets.
func (o *Order) GiveBack(ticket uint64) {
	if place := o.claim(ticket); place != nil {
		place.Leave()
	}
}

func (o *Order) claim(ticket uint64) *turns.Place {
	o.mu.Lock()
	defer o.mu.Unlock()
	place := o.waiting[ticket]
	delete(o.waiting, ticket)
	return place
}

// Call is a call with or without an order. Without one, it begins at once.
type Call struct{ place *turns.Place }

// Claim takes a call's ticket from its metadata. The caller ends the call by End. If Claim returns
// an error, that error with its code is the call's answer, and the call must do nothing.
func (o *Order) Claim(ctx context.Context) (Call, error) {
	text, ok := ttrpc.GetMetadataValue(ctx, Key)
	if !ok {
		return Call{}, nil
	}
	ticket, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return Call{}, status.Errorf(codes.InvalidArgument, "metadata %s: %.40q is not a ticket", Key, text)
	}
	place := o.claim(ticket)
	if place == nil {
		return Call{}, status.Error(codes.DeadlineExceeded, "the connection ended before the call began: nothing was done")
	}
	return Call{place}, nil
}

// End ends the call's ticket, whether or not the call has joined.
func (c Call) End() {
	if c.place != nil {
		c.place.Leave()
	}
}

type placeKey struct{}

// Begin waits until all earlier calls have joined, and returns a context for Joined. If Begin
// returns an error, that error with its code is the call's answer, and the call must do nothing.
func (c Call) Begin(ctx context.Context) (context.Context, error) {
	if c.place == nil {
		return ctx, nil
	}
	early, cancel := deadline.Early(ctx)
	defer cancel()
	if err := c.place.Await(early); err != nil {
		return nil, status.Errorf(codes.DeadlineExceeded, "an earlier call still waits to begin: nothing was done: %v", err)
	}
	return context.WithValue(ctx, placeKey{}, c.place), nil
}

// Joined reports that the call of ctx has its place in the queue that it waits in, so that the
// calls after it may begin. It may be called again, and for a call without a ticket.
func Joined(ctx context.Context) {
	if place, ok := ctx.Value(placeKey{}).(*turns.Place); ok {
		place.Leave()
	}
}
