package debugconsole

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openTerminal opens a new pseudo-terminal (pts(4)). ours is the agent's side, which supports
// deadlines; end is for the shell. The caller closes both.
func openTerminal() (ours, end *os.File, err error) {
	ours, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open a pseudo-terminal: %w (is devpts mounted at /dev/pts?)", err)
	}
	if end, err = endOf(ours); err != nil {
		ours.Close()
		return nil, nil, err
	}
	return ours, end, nil
}

func endOf(ours *os.File) (*os.File, error) {
	raw, err := ours.SyscallConn()
	if err != nil {
		return nil, err
	}
	var number uint32
	var callErr error
	err = raw.Control(func(fd uintptr) {
		if callErr = os.NewSyscallError("ioctl(TIOCSPTLCK)", unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0)); callErr == nil {
			number, callErr = unix.IoctlGetUint32(int(fd), unix.TIOCGPTN)
			callErr = os.NewSyscallError("ioctl(TIOCGPTN)", callErr)
		}
	})
	if err == nil {
		err = callErr
	}
	if err != nil {
		return nil, fmt.Errorf("open a pseudo-terminal: %w", err)
	}
	return openEnd(fmt.Sprintf("/dev/pts/%d", number))
}

// openEnd opens a terminal for a shell. The file is not in Go's poller, because that would make it
// non-blocking for the shell, too. The terminal does not become the agent's controlling terminal.
func openEnd(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}
