package agentclient

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/protocols/address"
)

// ErrOutcomeUnknown is the failure of a call that was sent, got no answer and may do harm when it is made twice: whether the agent has carried it out
// is not known.
var ErrOutcomeUnknown = errors.New("it was sent and not answered, so nobody knows whether it was carried out: look before you make it again")

// Why a client's life ended.
var (
	errClosed = errors.New("the client was closed")
	errLost   = errors.New("the agent cannot be reached any more")
)

// callError reads well and keeps its gRPC code for status.Code.
type callError struct {
	method  method
	address address.Address
	status  *status.Status
	causes  []error
}

// failure says how a call failed.
func (c *Client) failure(ctx context.Context, m method, f *failed) error {
	if f.kind == broken && c.vsock != nil {
		wait(ctx, reasonLimit) // the connection breaks first, and then it is known what has carried it
	}
	st := status.Convert(f.err)
	e := &callError{method: m, address: c.address}
	code, text := st.Code(), printable(st.Message())
	switch end := context.Cause(c.life); {
	case f.kind != broken:
	case errors.Is(end, errLost):
		reason := c.vsock.VsockErr()
		code, text = codes.Unavailable, printable(fmt.Sprintf("%v: %v", errLost, reason))
		e.causes = append(e.causes, reason)
	case end != nil:
		code, text = codes.Unavailable, end.Error()
	case ctx.Err() != nil:
		code, text = status.FromContextError(ctx.Err()).Code(), fmt.Sprintf("%v: %s", ctx.Err(), text)
		e.causes = append(e.causes, ctx.Err())
	}
	if f.kind != answered && f.sent && !m.repeatable {
		e.causes = append(e.causes, ErrOutcomeUnknown)
		text = fmt.Sprintf("%s; %v", text, ErrOutcomeUnknown)
	}
	e.status = status.New(code, text)
	return e
}

func (e *callError) Error() string {
	return fmt.Sprintf("%s at %s: %s (%s)", e.method.name, e.address, e.status.Message(), e.status.Code())
}

// GRPCStatus is what status.Code and status.Convert ask for.
func (e *callError) GRPCStatus() *status.Status { return e.status }

// Unwrap returns ErrOutcomeUnknown, a context's end and VsockErr's reason, those of them that apply.
func (e *callError) Unwrap() []error { return e.causes }

// printable makes a guest's text fit for a terminal and a log: bounded, one line, no control characters.
func printable(text string) string {
	if len(text) > maxText {
		text = text[:maxText]
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, ""))
}
