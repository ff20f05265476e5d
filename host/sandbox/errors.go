package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
)

// Why a call fails, for errors.Is. The agent's status code, where it answered, is kept
// for status.Code, and the context's end for errors.Is.
var (
	// ErrNotFound: the sandbox has no such volume, or it is not mounted.
	ErrNotFound = errors.New("not found")
	// ErrOtherParameters: the volume is there, with another store, filesystem or options.
	ErrOtherParameters = errors.New("it is there with other parameters")
	// ErrBusy: something uses the volume, or another call is at it: later it may be free.
	ErrBusy = errors.New("busy")
	// ErrInfeasible: it cannot be done as things are, and repeating it does not help.
	ErrInfeasible = errors.New("infeasible")
	// ErrWouldShrink: a size below the present one.
	ErrWouldShrink = errors.New("it would shrink")
	// ErrLost: the disk has left its machine, and nobody detached it. Attach brings it back.
	ErrLost = errors.New("its disk has left the machine")
	// ErrOutcomeUnknown: the call was cut off, and may have been carried out. Made again it
	// goes on where it stopped.
	ErrOutcomeUnknown = errors.New("whether it was carried out is not known: repeat it")
	// ErrStoreHangs: the store did not answer a small read, or nobody could make one.
	ErrStoreHangs = errors.New("its store does not answer")
	// ErrHotplugHeld: the guest does not let go of another disk, and no disk comes or goes
	// until it does.
	ErrHotplugHeld = errors.New("the guest does not let go of another disk")
	// ErrKept is a machine's: the guest refused to let go of a disk, which stays.
	ErrKept = errors.New("the guest keeps it")
	// ErrEnded is a machine's: it ended otherwise than by its guest's power-off.
	ErrEnded = errors.New("the machine has ended")
	// ErrUnheard is a machine's: it ended in order, and nobody heard whether by its guest's
	// power-off. Where it is said, ErrEnded is too.
	ErrUnheard = errors.New("nobody heard whether its guest powered off")
)

// Error is the failure of a call that concerns a volume, for errors.As.
type Error struct {
	// Call is what failed, such as "mount", and Volume the caller's id.
	Call, Volume string
	// State is the volume's when the call ended.
	State State
	// Err wraps one of the errors above.
	Err error
}

// Error names the call and the volume.
func (e *Error) Error() string { return fmt.Sprintf("%s volume %s: %v", e.Call, e.Volume, e.Err) }

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// isKnown reports whether an agent's error says that the call has done nothing, or has
// undone it. A call that met its deadline may go on.
func isKnown(ctx context.Context, err error) bool {
	code := status.Code(err)
	return ctx.Err() == nil && !errors.Is(err, agentclient.ErrOutcomeUnknown) && code != codes.DeadlineExceeded && code != codes.Canceled
}

// meaning are what an agent's refusals mean, by their codes.
type meaning map[codes.Code]error

// What refusals mean, by call.
var (
	ofMount = meaning{codes.InvalidArgument: ErrInfeasible, codes.FailedPrecondition: ErrInfeasible, codes.AlreadyExists: ErrOtherParameters, codes.Unimplemented: ErrInfeasible}
	ofTake  = meaning{codes.FailedPrecondition: ErrBusy}
	ofGrow  = meaning{codes.FailedPrecondition: ErrInfeasible, codes.InvalidArgument: ErrInfeasible, codes.OutOfRange: ErrWouldShrink, codes.NotFound: ErrNotFound}
	ofStats = meaning{codes.NotFound: ErrNotFound}
)

// typed adds to an agent's error what it means.
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

// also is err, which is a what too and says no more by that.
func also(what, err error) error { return &kind{what, err} }

type kind struct{ what, err error }

func (k *kind) Error() string   { return k.err.Error() }
func (k *kind) Unwrap() []error { return []error{k.what, k.err} }

// lacksService tells an agent that has no such service: Go's ttrpc answers
// UNIMPLEMENTED for it, and Rust's INVALID_ARGUMENT with these words.
func lacksService(err error) bool {
	return status.Code(err) == codes.Unimplemented || status.Code(err) == codes.InvalidArgument && strings.Contains(err.Error(), "service does not exist")
}
