// Package arrival has calls begin in the order in which their frames were read. ttrpc's
// server (github.com/containerd/ttrpc, services.go) gives each call a goroutine of its
// own, and these run in any order: a call that was given up could overtake its opposite,
// which its caller made after it.
//
// The transport takes a ticket for each call that changes who holds what, when its frame
// is here whole, and sends the ticket up with the call as metadata. The call waits until
// all with earlier tickets have joined the queue that they wait in, which waits for no
// disk; then it joins its own, and says so (Joined).
//
//	the call is answered, joined or not   its ticket is given back
//	its connection ends before it began   the same; it does nothing when it begins
//	it has no ticket                      it begins when it comes
//
// Of two connections the order is the same, that of reading. A caller that makes a new
// connection ends the old one first; the transport hands nothing up that it reads when
// its peer has hung up, so no call of the old connection comes behind one of the new.
// This holds as far as the way to the guest shows it the end of one connection before the
// bytes of a later one, as virtio's vsock does. Two callers that use a connection each at
// the same time have no order but that of reading.
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

// Key is the metadata that a call's ticket travels as, inside the agent.
const Key = "directvol-ticket"

// Order is the order of calls. The zero value is ready.
type Order struct {
	// Of reports whether a call changes who holds what, and so has an order. It is set before
	// the first call; nil says no.
	Of func(*ttrpcframe.Request) bool

	line turns.Turns // of those that have not joined yet

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]*turns.Place // whose calls have not begun, by ticket
}

// Has reports whether a call has an order.
func (o *Order) Has(r *ttrpcframe.Request) bool { return o.Of != nil && o.Of(r) }

// Take returns the next ticket, which is above 0. The caller gives it back when the call
// is answered, or will not be.
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

// GiveBack ends a ticket whose call has not begun, and does nothing to another.
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

// Call is one that has an order, or none: then it begins at once.
type Call struct{ place *turns.Place }

// Claim takes a call's ticket from its metadata; the caller ends the call by End. An error
// is the call's answer, with its code, and the call is to do nothing.
func (o *Order) Claim(ctx context.Context) (Call, error) {
	text, ok := ttrpc.GetMetadataValue(ctx, Key)
	if !ok {
		return Call{}, nil
	}
	ticket, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return Call{}, status.Errorf(codes.InvalidArgument, "metadata %s: %.40q is no ticket", Key, text)
	}
	place := o.claim(ticket)
	if place == nil {
		return Call{}, status.Error(codes.DeadlineExceeded, "its connection ended before it began: nothing was done")
	}
	return Call{place}, nil
}

// End ends the call's ticket, joined or not.
func (c Call) End() {
	if c.place != nil {
		c.place.Leave()
	}
}

type placeKey struct{}

// Begin waits until all calls have joined that came before this one, and returns a context
// for Joined. An error is the call's answer, with its code, and the call is to do nothing.
func (c Call) Begin(ctx context.Context) (context.Context, error) {
	if c.place == nil {
		return ctx, nil
	}
	early, cancel := deadline.Early(ctx)
	defer cancel()
	if err := c.place.Await(early); err != nil {
		return nil, status.Errorf(codes.DeadlineExceeded, "a call that came before it still waits to begin: nothing was done: %v", err)
	}
	return context.WithValue(ctx, placeKey{}, c.place), nil
}

// Joined says that the call of ctx has its place among those that it waits for: the calls
// behind it may begin. It may be said again, and of a call without a ticket.
func Joined(ctx context.Context) {
	if place, ok := ctx.Value(placeKey{}).(*turns.Place); ok {
		place.Leave()
	}
}
