package vhostvsock

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/protocols/address"
)

// newSuffix ends the name under which a socket is made, before it is renamed.
const newSuffix = ".new"

// maxSocketPath leaves room for newSuffix.
const maxSocketPath = address.MaxPath - len(newSuffix)

// listenUnix makes a listening, non-blocking stream socket at path and
// replaces a stale one. The path appears only when it can be connected to, so
// that whoever waits for it may connect at once.
func listenUnix(path string) (fd int, err error) {
	if path == "" {
		return -1, errors.New("socket path is empty")
	}
	if len(path) > maxSocketPath {
		return -1, fmt.Errorf("socket path %s has %d bytes, the limit is %d: choose a shorter one", path, len(path), maxSocketPath)
	}
	if err := checkFree(path); err != nil {
		return -1, err
	}
	fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket %s: %w", path, err)
	}
	if err := bindAndShow(fd, path); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("listen on socket %s: %w", path, err)
	}
	return fd, nil
}

// bindAndShow listens under a passing name and then renames it to path.
func bindAndShow(fd int, path string) error {
	passing := path + newSuffix
	if err := checkFree(passing); err != nil {
		return err
	}
	os.Remove(passing)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: passing}); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("make its folder first: %w", err)
		}
		return fmt.Errorf("bind: %w", err)
	}
	err := unix.Listen(fd, unix.SOMAXCONN)
	if err != nil {
		err = fmt.Errorf("listen: %w", err)
	} else {
		err = os.Rename(passing, path)
	}
	if err != nil {
		os.Remove(passing)
	}
	return err
}

// checkFree says whether path is unused or holds a socket that nobody listens
// on. A live listener is not disturbed: a connect with the wrong socket type
// fails with EPROTOTYPE where there is one, and with ECONNREFUSED where not.
func checkFree(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("%s exists and is not a socket: remove it or choose another path", path)
	}
	probe, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	defer unix.Close(probe)
	switch err := unix.Connect(probe, &unix.SockaddrUnix{Name: path}); {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
		return nil
	case err == nil, errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("socket %s is taken by a running process: stop it or choose another path", path)
	default:
		return fmt.Errorf("socket %s: %w", path, err)
	}
}
