package operation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"syscall"

	"github.com/directvol/directvol/tests/guest/remote"
)

// execute runs a program, and kills it when ctx ends.
func execute(ctx context.Context, args remote.Command) (remote.Exit, error) {
	if len(args.Argv) == 0 {
		return remote.Exit{}, errors.New("exec: no program named")
	}
	if len(args.Stdin) > remote.MaxData {
		return remote.Exit{}, fmt.Errorf("exec %s: %d bytes of input are more than %d", args.Argv[0], len(args.Stdin), remote.MaxData)
	}
	var stdout, stderr head
	cmd := exec.CommandContext(ctx, args.Argv[0], args.Argv[1:]...)
	cmd.Env = args.Env
	cmd.Stdin = bytes.NewReader(args.Stdin) // a pipe: an image may have no /dev/null
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if _, failed := errors.AsType[*exec.ExitError](err); err != nil && !failed {
		return remote.Exit{}, fmt.Errorf("exec: %w", err)
	}
	exit := remote.Exit{
		Code: cmd.ProcessState.ExitCode(), Stdout: stdout.kept.Bytes(), Stderr: stderr.kept.Bytes(),
		Truncated: stdout.truncated || stderr.truncated,
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		exit.Signal = status.Signal().String()
	}
	return exit, nil
}

// head keeps the first MaxOutput bytes that are written to it and discards the rest, so that the
// writer never blocks.
type head struct {
	kept      bytes.Buffer
	truncated bool
}

func (h *head) Write(p []byte) (int, error) {
	keep := min(len(p), remote.MaxOutput-h.kept.Len())
	h.kept.Write(p[:keep])
	h.truncated = h.truncated || keep < len(p)
	return len(p), nil
}
