package guestinit

import (
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// EndAll ends every other process of the guest. Only PID 1 may call it. It sends SIGTERM, waits,
// sends SIGKILL to the remaining processes, and waits again, each time up to patience: a process
// that waits for a disk does not end.
func EndAll(patience time.Duration) {
	for _, signal := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		all := processes()
		_ = unix.Kill(-1, signal) // fails if there is no other process
		awaitEnd(all, patience)
	}
}

// processes opens a pidfd for each other process. It skips kernel threads, which have no program.
func processes() (files []*os.File) {
	all, _ := os.ReadDir("/proc")
	for _, entry := range all {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if _, err := os.Readlink("/proc/" + entry.Name() + "/exe"); err != nil {
			continue
		}
		if fd, err := unix.PidfdOpen(pid, 0); err == nil {
			files = append(files, os.NewFile(uintptr(fd), entry.Name()))
		}
	}
	return files
}

// awaitEnd waits until processes have ended, and closes their pidfds. A pidfd becomes readable when
// its process has ended (pidfd_open(2)).
func awaitEnd(all []*os.File, patience time.Duration) {
	defer func() {
		for _, process := range all {
			process.Close()
		}
	}()
	until := time.Now().Add(patience)
	for _, process := range all {
		poll := []unix.PollFd{{Fd: int32(process.Fd()), Events: unix.POLLIN}}
		for left := time.Until(until); left > 0; left = time.Until(until) {
			if n, err := unix.Poll(poll, int(left.Milliseconds())+1); n > 0 || err != nil && err != unix.EINTR {
				break
			}
		}
	}
}
