package rescue

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
)

// mountError is the refusal of the VM's kernel to mount the disk.
type mountError struct {
	error
	// unclean is true if the kernel found the filesystem damaged (EUCLEAN). An interrupted growth
	// shows only in this way.
	unclean bool
}

func (e mountError) Unwrap() error { return e.error }

// Error returns only the kernel's error. The agent's text also advises to run a rescue, which is
// what is running.
func (e mountError) Error() string {
	for _, errno := range refusals {
		if strings.Contains(e.error.Error(), errno.Error()) {
			return errno.Error()
		}
	}
	return e.error.Error()
}

// refusals are the errors of mount(2) that are caused by the content of a disk.
var refusals = []unix.Errno{unix.EUCLEAN, unix.EINVAL}

// refusal converts the error of a Mount to a mountError if the agent answered that mount(2) failed.
// It returns any other error unchanged, because a VM that has ended, a call without an answer, or
// an answer about something else shows nothing about the filesystem.
//
// For most filesystem errors of mount(2) the agent answers FailedPrecondition or InvalidArgument,
// with the call and the error in the text (agent/storage).
func refusal(fstype string, err error) error {
	if errors.Is(err, agentclient.ErrOutcomeUnknown) || errors.Is(err, qemu.ErrEnded) {
		return err
	}
	answer := status.Convert(err)
	if !slices.Contains([]codes.Code{codes.FailedPrecondition, codes.InvalidArgument}, answer.Code()) {
		return err
	}
	_, call, ok := strings.Cut(answer.Message(), "mount "+fstype+" of ")
	if !ok {
		return err
	}
	for _, errno := range refusals {
		if strings.Contains(call, ": "+errno.Error()) {
			return mountError{err, errno == unix.EUCLEAN}
		}
	}
	return err
}

// isRefusal reports whether the VM's kernel refused a mount.
func isRefusal(err error) bool {
	_, refused := errors.AsType[mountError](err)
	return refused
}

// isUnclean reports whether the VM's kernel found the filesystem damaged.
func isUnclean(err error) bool {
	refused, ok := errors.AsType[mountError](err)
	return ok && refused.unclean
}
