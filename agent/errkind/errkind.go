// Package errkind classifies the agent's errors: an error that refuses a call has one of a few
// kinds. agent/rpc turns kinds into status codes; the packages below it do not know about codes.
package errkind

import (
	"errors"
	"fmt"
)

// Kind is a class of errors that a caller can act on.
type Kind int

// The kinds. An error without a kind is Internal: the agent failed, not the request.
const (
	Internal           Kind = iota
	InvalidArgument         // the request can never be right
	NotFound                // something that the request names does not exist
	AlreadyExists           // the object exists, but differs from the request
	FailedPrecondition      // the state forbids the call, and waiting does not help
	OutOfRange              // a size beyond the possible range
	DeadlineExceeded        // the call may succeed if it is repeated
	Unimplemented           // known, but not implemented
	Aborted                 // something else has ended what the call has begun
)

type refused struct {
	kind Kind
	err  error
}

func (r *refused) Error() string { return r.err.Error() }
func (r *refused) Unwrap() error { return r.err }

// New returns an error of a kind. format and args are those of fmt.Errorf, including %w.
func New(kind Kind, format string, args ...any) error {
	return &refused{kind, fmt.Errorf(format, args...)}
}

// Of returns the kind of the outermost error in err's chain that New has made, or Internal.
func Of(err error) Kind {
	if r, ok := errors.AsType[*refused](err); ok {
		return r.kind
	}
	return Internal
}
