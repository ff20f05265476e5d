package fsck

import (
	"bufio"
	"context"
	"errors"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A program that ignores SIGTERM gets SIGKILL after endLimit. The test shortens that limit.
func TestProgramThatDoesNotEndIsKilled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := command(ctx, "/bin/sh", "-c", `trap "echo term" TERM; echo ready; while :; do read -r line; done`)
	if cmd.WaitDelay != endLimit {
		t.Errorf("want %v to end in\ngot  %v", endLimit, cmd.WaitDelay)
	}
	cmd.WaitDelay = 10 * time.Millisecond
	in, err := cmd.StdinPipe() // never written to
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	if err := cmd.Cancel(); err != nil {
		t.Fatal(err)
	}
	if lines.Scan(); lines.Text() != "term" {
		t.Errorf("want SIGTERM first\ngot  %q, error %v", lines.Text(), lines.Err())
	}
	cancel()
	err = cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Errorf("want it killed\ngot  %v", err)
	}
}
