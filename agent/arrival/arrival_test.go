package arrival

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// carrying returns the context of a call with a ticket.
func carrying(ctx context.Context, ticket uint64) context.Context {
	return ttrpc.WithMetadata(ctx, ttrpc.MD{Key: {strconv.FormatUint(ticket, 10)}})
}

// begun makes a call begin and join.
func (o *Order) begun(ctx context.Context, ticket uint64) error {
	call, err := o.Claim(carrying(ctx, ticket))
	if err != nil {
		return err
	}
	defer call.End()
	if ctx, err = call.Begin(ctx); err == nil {
		Joined(ctx)
	}
	return err
}

func TestCallsBeginInTheOrderOfTheirTickets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var order Order
		var tickets []uint64
		for range 20 {
			tickets = append(tickets, order.Take())
		}
		var got []uint64
		for i := len(tickets) - 1; i >= 0; i-- {
			call, err := order.Claim(carrying(t.Context(), tickets[i]))
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				ctx, err := call.Begin(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				got = append(got, tickets[i])
				Joined(ctx)
				Joined(ctx)
			}()
			synctest.Wait()
		}
		for i := range tickets {
			if len(got) != len(tickets) || got[i] != tickets[i] {
				t.Fatalf("order\nwant %v\ngot  %v", tickets, got)
			}
		}
		if len(order.waiting) > 0 {
			t.Errorf("tickets that are left: %v", order.waiting)
		}
	})
}

// A call that ends without joining, or never begins, must not block other calls.
func TestEndedTicketsDelayNoOtherCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var order Order
		ended, over, last := order.Take(), order.Take(), order.Take()
		call, err := order.Claim(carrying(t.Context(), ended))
		if err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		late, waits := order.Take(), time.Now()
		if err := order.begun(short, late); status.Code(err) != codes.DeadlineExceeded || time.Since(waits) >= time.Second {
			t.Errorf("behind a call that has not joined, before its deadline\nwant DeadlineExceeded\ngot  %v", err)
		}
		call.End()
		order.GiveBack(over)
		if err := order.begun(t.Context(), last); err != nil {
			t.Errorf("when those before it are over: %v", err)
		}
		if err := order.begun(t.Context(), over); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("a call whose connection is over\nwant it refused\ngot  %v", err)
		}
	})
}

func TestCallWithoutATicketBeginsAtOnce(t *testing.T) {
	var order Order
	order.Take()
	call, err := order.Claim(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer call.End()
	ctx, err := call.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	Joined(ctx)
	if _, err := order.Claim(ttrpc.WithMetadata(t.Context(), ttrpc.MD{Key: {"x"}})); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a ticket that is not a number\nwant InvalidArgument\ngot  %v", err)
	}
}
