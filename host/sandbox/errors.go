package sandbox

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
)

// The reasons why a call fails, for errors.Is. The error also keeps the agent's status code, if the
// agent answered, for status.Code, and the context's error for errors.Is.
var (
	// ErrNotFound: the sandbox does not have the volume, or the agent finds no mount at its path in
	// the guest: it is not mounted, or somebody has put a symbolic link into the path.
	ErrNotFound = errors.New("not found")
	// ErrOtherParameters: the sandbox has the volume already, with another store, filesystem or
	// options.
	ErrOtherParameters = errors.New("it exists with other parameters")
	// ErrBusy: the volume is in use, or another call works on it. The call may succeed later.
	ErrBusy = errors.New("busy")
	// ErrInfeasible: the call is not possible in the present situation, and repeating it does not
	// help.
	ErrInfeasible = errors.New("infeasible")
	// ErrWouldShrink: the size is below the present one.
	ErrWouldShrink = errors.New("it would shrink")
	// ErrLost: the disk has left its machine without being detached. Attach brings it back.
	ErrLost = errors.New("its disk has left the machine")
	// ErrOutcomeUnknown: the call was interrupted and may have been carried out. Repeating the call
	// resumes it.
	ErrOutcomeUnknown = errors.New("it may have been carried out: repeat it")
	// ErrStoreHangs: the store did not answer a small read, or the read could not be made.
	ErrStoreHangs = errors.New("its store does not answer")
	// ErrHotplugHeld: the guest has not released another disk, and until it does, no disk can be
	// attached or detached.
	ErrHotplugHeld = errors.New("the guest does not release another disk")
	// ErrNotAsked is returned by a machine that has not asked the guest to release a disk: the disk
	// stays.
	ErrNotAsked = errors.New("the guest was not asked to release it")
	// ErrKept is returned by a machine: the guest refused to release a disk, and the disk stays.
	ErrKept = errors.New("the guest refused to release it")
	// ErrEnded is returned by a machine: it ended in another way than by its guest's power-off.
	ErrEnded = errors.New("the machine has ended")
	// ErrUnheard is returned by a machine: it ended cleanly, but it is not known whether its guest
	// powered off. An error that matches ErrUnheard also matches ErrEnded.
	ErrUnheard = errors.New("it is not known whether its guest powered off")
)

// Error is the failure of a call on a volume, for errors.As.
type Error struct {
	// Call is the name of the failed call, such as "mount". Volume is the caller's id of the
	// volume.
	Call, Volume string
	// State is the volume's state when the call ended.
	State State
	// Err wraps one of the errors above.
	Err error
}

// Error names the call and the volume.
func (e *Error) Error() string { return fmt.Sprintf("%s volume %s: %v", e.Call, e.Volume, e.Err) }

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// isKnown reports whether an agent's error means that the call has had no effect, or that its
// effect was undone. A call that exceeded its deadline may still be carried out.
func isKnown(ctx context.Context, err error) bool {
	code := status.Code(err)
	return ctx.Err() == nil && !errors.Is(err, agentclient.ErrOutcomeUnknown) && code != codes.DeadlineExceeded && code != codes.Canceled
}

// meaning maps the status codes of an agent's refusals to this package's errors.
type meaning map[codes.Code]error

// The meanings of refusals, by kind of call.
var (
	ofMount = meaning{codes.InvalidArgument: ErrInfeasible, codes.FailedPrecondition: ErrInfeasible, codes.AlreadyExists: ErrOtherParameters, codes.Unimplemented: ErrInfeasible}
	ofTake  = meaning{codes.FailedPrecondition: ErrBusy}
	ofGrow  = meaning{codes.FailedPrecondition: ErrInfeasible, codes.InvalidArgument: ErrInfeasible, codes.OutOfRange: ErrWouldShrink, codes.NotFound: ErrNotFound, codes.Unimplemented: ErrInfeasible}
	ofStats = meaning{codes.NotFound: ErrNotFound, codes.InvalidArgument: ErrNotFound} // no path, no mount there, or a link
)

// typed adds to an agent's error the error that its status code stands for.
func (m meaning) typed(ctx context.Context, err error) error {
	what := m[status.Code(err)]
	if !isKnown(ctx, err) {
		what = ErrOutcomeUnknown
	}
	if err == nil || what == nil || errors.Is(err, what) {
		return err
	}
	return also(what, err)
}

// also returns err so that it also matches what. The text is err's.
func also(what, err error) error { return &kind{what, err} }

type kind struct{ what, err error }

func (k *kind) Error() string   { return k.err.Error() }
func (k *kind) Unwrap() []error { return []error{k.what, k.err} }
