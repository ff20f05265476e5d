package guestinit

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// children are the processes that Start started and that have not been waited
// for. The lock is held while one starts, so that it is known before it is reaped.
var children struct {
	sync.Mutex
	reaped bool // Reap waits for every child of this process
	waits  map[int]chan<- unix.WaitStatus
}

// Reap waits for every process that ends and has no parent but PID 1, for as
// long as this process lives. It would take the exit status from os/exec's
// Wait: nothing else in this program may start a process but by Start.
func Reap() {
	children.Lock()
	children.reaped, children.waits = true, map[int]chan<- unix.WaitStatus{}
	children.Unlock()
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	go func() {
		for range ended {
			reapAll()
		}
	}()
	reapAll() // those that ended before the signal was ours
}

func reapAll() {
	children.Lock()
	defer children.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid == 0 {
			return
		}
		if wait, ours := children.waits[pid]; ours {
			delete(children.waits, pid)
			wait <- status
		}
	}
}

// Start starts a process as os.StartProcess does, whether or not this process
// reaps. The channel gets its status once, when it has ended; then it is waited
// for. The process can be signalled, and neither waited for nor released.
func Start(name string, argv []string, attr *os.ProcAttr) (*os.Process, <-chan unix.WaitStatus, error) {
	children.Lock()
	defer children.Unlock()
	process, err := os.StartProcess(name, argv, attr)
	if err != nil {
		return nil, nil, err
	}
	ended := make(chan unix.WaitStatus, 1)
	if children.reaped {
		children.waits[process.Pid] = ended
		return process, ended, nil
	}
	go func() {
		var status unix.WaitStatus
		if state, err := process.Wait(); err == nil {
			status = unix.WaitStatus(state.Sys().(syscall.WaitStatus))
		}
		ended <- status
	}()
	return process, ended, nil
}

// PowerOff writes everything back, which a disk that hangs keeps it from until ctx ends,
// and ends the VM. It returns only with an error.
func PowerOff(ctx context.Context) error {
	written := make(chan struct{})
	go func() {
		unix.Sync()
		close(written)
	}()
	select {
	case <-written:
	case <-ctx.Done():
	}
	return os.NewSyscallError("reboot(POWER_OFF)", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}
