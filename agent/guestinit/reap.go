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

// children are the processes that Start has started and that have not been waited for. Start holds
// the lock while it starts a process, so that the process is in waits before it is reaped.
var children struct {
	sync.Mutex
	reaped bool // Reap waits for every child of this process
	waits  map[int]chan<- unix.WaitStatus
}

// Reap waits for every process that ends and whose parent is PID 1, for as long as this process
// lives. It would take the exit status away from os/exec's Wait, so this program must start
// processes only by Start.
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
	reapAll() // processes that ended before Notify
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

// Start starts a process as os.StartProcess does, whether or not Reap was called. The channel
// receives the exit status once, after the process was waited for. The caller may signal the
// process, but must neither wait for nor release it.
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

// PowerOff writes all data back and powers the VM off. If a disk hangs, PowerOff waits only until
// ctx ends. It returns only with an error.
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
