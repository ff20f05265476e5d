package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Process is a process of this host.
type Process struct {
	ID   int
	Args []string
}

// ProcessesWith returns the processes, except this one, with some text in an argument. A path that
// only one guest has finds the guest's QEMU and vsock backend.
func ProcessesWith(text string) ([]Process, error) {
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	var found []Process
	for _, path := range commands {
		line, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(line, []byte(text)) { // the process may have ended
			continue
		}
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			return nil, err
		}
		if id == os.Getpid() {
			continue
		}
		p := Process{ID: id}
		for arg := range bytes.SplitSeq(bytes.TrimSuffix(line, []byte{0}), []byte{0}) {
			p.Args = append(p.Args, string(arg))
		}
		found = append(found, p)
	}
	return found, nil
}

// IsBackend reports whether a process is a guest's vsock backend, and not its QEMU.
func (p Process) IsBackend() bool { return slices.Contains(p.Args, "vhost-vsock") }

// Ending opens a process whose end is of interest, although it is no child of this process. ended
// waits for that end and closes the process. A zombie counts as ended.
func Ending(id int) (ended func(context.Context) error, err error) {
	fd, err := unix.PidfdOpen(id, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", id, err)
	}
	return func(ctx context.Context) error {
		defer unix.Close(fd)
		err := Again(ctx, func() (bool, error) {
			// The descriptor becomes readable when all threads have ended (pidfd_open(2)).
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			if errors.Is(err, unix.EINTR) {
				err = nil
			}
			return n > 0, err
		})
		if err != nil {
			return fmt.Errorf("wait for the end of process %d: %w", id, err)
		}
		return nil
	}, nil
}
