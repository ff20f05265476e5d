package kernel

import (
	"context"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// command returns a program in a process group of its own: a Ctrl-C on the terminal reaches only
// this process, and the end of ctx ends the whole group. The program's temporary files go to temp,
// which the caller removes.
func command(ctx context.Context, temp, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive", "TMPDIR="+temp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error {
		if unix.Kill(-cmd.Process.Pid, unix.SIGKILL) == unix.ESRCH {
			return os.ErrProcessDone
		}
		return nil
	}
	cmd.WaitDelay = 5 * time.Second // a process that waits for a disk keeps the pipes open
	return cmd
}
