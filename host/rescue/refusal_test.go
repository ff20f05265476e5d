package rescue

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/host/qemu"
)

// answered returns the error of Mount for an answer of the agent.
func answered(code codes.Code, text string) error {
	return fmt.Errorf("mount volume rescue from /proc/7/fd/3: %w", status.Error(code, text))
}

const uncleanText = `mount xfs of /dev/vda at /run/v with "": structure needs cleaning: the guest's kernel log says more`

func TestOnlyTheKernelsErrnoIsARefusal(t *testing.T) {
	for _, c := range []struct {
		err              error
		refused, unclean bool
	}{
		{answered(codes.FailedPrecondition, uncleanText), true, true},
		{answered(codes.InvalidArgument, `mount xfs of /dev/vda at /run/v with "": invalid argument: x`), true, false},
		{answered(codes.FailedPrecondition, `mount xfs of /dev/vda at /run/v with "": device or resource busy: x`), false, false},
		{answered(codes.FailedPrecondition, "the growth of /dev/vda was cut off, so it has to be mounted twice"), false, false},
		{answered(codes.InvalidArgument, "storage: empty message"), false, false},
		{answered(codes.Internal, `mount xfs of /dev/vda at /run/v with "": input/output error: x`), false, false},
		{answered(codes.Internal, uncleanText), false, false},
		{answered(codes.Unavailable, "the agent is no longer reachable"), false, false},
		{answered(codes.DeadlineExceeded, uncleanText), false, false},
		{fmt.Errorf("%w: %w", answered(codes.FailedPrecondition, uncleanText), agentclient.ErrOutcomeUnknown), false, false},
		{fmt.Errorf("mount volume: %w: killed", qemu.ErrEnded), false, false},
		{errors.New(uncleanText), false, false},
	} {
		if err := refusal("xfs", c.err); isRefusal(err) != c.refused || isUnclean(err) != c.unclean || !errors.Is(err, c.err) {
			t.Errorf("%v\nwant refused %t, damaged %t\ngot  %#v", c.err, c.refused, c.unclean, err)
		}
	}
}

// If a VM died, or its kernel refused for another reason than damage, the rescue must not run
// e2fsck or write another superblock. Only the refusal may come with advice.
func TestOtherErrorsStartNoFurtherAttempt(t *testing.T) {
	for _, fstype := range []string{"xfs", "ext4"} {
		path := grownImage(t)
		if fstype == "ext4" {
			path = made(t, "mkfs.ext4", "-q", "-F")
		}
		before := hash(t, path)
		for _, err := range []error{
			fmt.Errorf("mount volume: %w: killed", qemu.ErrEnded),
			fmt.Errorf("mount volume: %w", agentclient.ErrOutcomeUnknown),
			answered(codes.Unavailable, "the agent is no longer reachable"),
			answered(codes.InvalidArgument, "mount "+fstype+" of /dev/vda at /v: invalid argument: x"),
		} {
			r := afterVM(t, fstype, path)
			r.found.replays = true
			attempts := 0
			r.attempt = func(context.Context) error {
				attempts++
				r.said = []string{eofs}
				return refusal(fstype, err)
			}
			got := r.mount(t.Context())
			if !errors.Is(got, err) || attempts != 1 || hash(t, path) != before || r.report.Superblock != nil {
				t.Errorf("%s, %v\nwant one attempt, and nothing written\ngot  %d, %v", fstype, err, attempts, got)
			}
			if !isRefusal(got) && (strings.Contains(got.Error(), "-L") || strings.Contains(got.Error(), "e2fsck")) {
				t.Errorf("%s: advice without a refusal: %v", fstype, got)
			}
			must(t, r.disk.Close())
		}
	}
}
