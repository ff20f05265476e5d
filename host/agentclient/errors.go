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

// ErrOutcomeUnknown is the failure of a call that was sent and got no answer, and that could do
// harm if repeated. It is not known whether the agent has carried out the call.
var ErrOutcomeUnknown = errors.New("it was sent but not answered, so it may have been carried out: check before you repeat it")

// The causes of the end of a client's life.
var (
	errClosed = errors.New("the client was closed")
	errLost   = errors.New("the agent is no longer reachable")
)

// LacksService reports whether the error of a call means that the agent does not have the called
// service: a kata-agent has no directvol.v1.VolumeService. Go's ttrpc answers UNIMPLEMENTED then,
// as to a method that the agent does not have; Rust's answers INVALID_ARGUMENT with these words.
func LacksService(err error) bool {
	return status.Code(err) == codes.Unimplemented || status.Code(err) == codes.InvalidArgument && strings.Contains(err.Error(), "service does not exist")
}

// callError has a readable text and keeps its gRPC code for status.Code.
type callError struct {
	method  method
	address address.Address
	status  *status.Status
	causes  []error
}

// failure returns the error of a failed call.
func (c *Client) failure(ctx context.Context, m method, f *failed) error {
	if f.kind == broken && c.vsock != nil {
		wait(ctx, reasonLimit) // the reason becomes known a moment after the connection breaks
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

// GRPCStatus returns the status, for status.Code and status.Convert.
func (e *callError) GRPCStatus() *status.Status { return e.status }

// Unwrap returns those that apply: ErrOutcomeUnknown, a context's error and the reason from
// VsockErr.
func (e *callError) Unwrap() []error { return e.causes }

// printable makes a guest's text safe for a terminal and a log: limited in length, on one line,
// without control characters.
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
