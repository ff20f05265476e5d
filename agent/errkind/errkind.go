// Package errkind is how the agent's packages say why a call is refused: an
// error with one of a few kinds. agent/rpc turns kinds into status codes;
// nothing below it knows about codes.
package errkind

import (
	"errors"
	"fmt"
)

// Kind is what a caller can act on.
type Kind int

// The kinds. An error without one is Internal: the agent failed, not the
// request.
const (
	Internal           Kind = iota
	InvalidArgument         // the request can never be right
	NotFound                // what it names does not exist
	AlreadyExists           // it exists, but differs from what is asked for
	FailedPrecondition      // the state forbids it, and waiting does not help
	OutOfRange              // a size outside of what can be
	DeadlineExceeded        // it may succeed when it is tried again
	Unimplemented           // known, and not built
)

type refused struct {
	kind Kind
	err  error
}

func (r *refused) Error() string { return r.err.Error() }
func (r *refused) Unwrap() error { return r.err }

// New makes an error of a kind; format and args are those of fmt.Errorf, %w
// included.
func New(kind Kind, format string, args ...any) error {
	return &refused{kind, fmt.Errorf(format, args...)}
}

// Of returns the kind of the outermost refusal in err's chain, or Internal.
func Of(err error) Kind {
	if r, ok := errors.AsType[*refused](err); ok {
		return r.kind
	}
	return Internal
}
