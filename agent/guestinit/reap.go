package guestinit

import (
	"errors"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// Reap waits for every process that ends and has no parent but PID 1, for as
// long as this process lives. It would take the exit status from os/exec's
// Wait: nothing else in this program may start a process.
func Reap() {
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
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid == 0 {
			return
		}
	}
}

// PowerOff writes everything back and ends the VM. It returns only with an
// error.
func PowerOff() error {
	unix.Sync()
	return os.NewSyscallError("reboot(POWER_OFF)", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}
