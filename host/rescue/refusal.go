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
	// unclean is set where the kernel finds the filesystem damaged (EUCLEAN). Only
	// that can come from a growth that was cut off.
	unclean bool
}

func (e mountError) Unwrap() error { return e.error }

// Error is the kernel's word alone: the agent's advice, which goes with it, is to
// come here.
func (e mountError) Error() string {
	for _, errno := range refusals {
		if strings.Contains(e.error.Error(), errno.Error()) {
			return errno.Error()
		}
	}
	return e.error.Error()
}

// refusals are what mount(2) answers for what a disk holds.
var refusals = []unix.Errno{unix.EUCLEAN, unix.EINVAL}

// refusal returns the failure of a Mount as a mountError where the agent has answered
// that mount(2) failed, and as it is otherwise: a VM that has ended, a call without
// an answer or with one about something else say nothing of the filesystem.
//
// The agent answers FailedPrecondition or InvalidArgument for most errors of mount(2)
// that come from the filesystem, and names the call and the error (agent/storage).
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

// isRefusal reports whether a mount was refused by the VM's kernel.
func isRefusal(err error) bool {
	_, refused := errors.AsType[mountError](err)
	return refused
}

// isUnclean reports whether that kernel has found the filesystem damaged.
func isUnclean(err error) bool {
	refused, ok := errors.AsType[mountError](err)
	return ok && refused.unclean
}
