package address

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// newSuffix is the suffix of the temporary name under which a socket is made.
	newSuffix = ".new"
	// lockSuffix is the suffix of the lock file that exists meanwhile.
	lockSuffix = ".lock"
)

// UnixSocket is a unix socket that listens at a path.
type UnixSocket struct {
	// FD is the listening stream socket, non-blocking and close-on-exec. The caller may close it at
	// any time; the socket at the path is stale from then on.
	FD int

	path string
	made fs.FileInfo
}

// ListenUnix makes a socket at path to which only its owner may connect: it has mode 0600 from the
// beginning, whatever the umask. It replaces a stale socket at path, on which nothing listens. It
// never replaces anything else; the error then names the path, and is EADDRINUSE if a process
// listens there. The path appears only when the socket accepts connections. If two processes call
// ListenUnix for one path at the same time, one of them gets it.
func ListenUnix(path string) (*UnixSocket, error) {
	end, err := begin(path)
	if err != nil {
		return nil, err
	}
	defer end()
	for _, name := range []string{path, path + newSuffix} {
		if err := claim(name); err != nil {
			return nil, err
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	made, err := bindAndShow(fd, path)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen on socket %s: %w", path, err)
	}
	return &UnixSocket{FD: fd, path: path, made: made}, nil
}

// begin keeps other processes from listening on the same path until end is called. The lock is a
// file beside the socket (flock(2)), so only processes that may write the directory can hold it. A
// lock file left by a killed process is reused.
func begin(path string) (end func(), err error) {
	if err := checkListenPath(path); err != nil {
		return nil, err
	}
	name := path + lockSuffix
	for {
		lock, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("socket %s: create its folder first: %w", path, err)
		}
		if err != nil {
			return nil, fmt.Errorf("socket %s: its lock: %w", path, err)
		}
		current, err := lockFile(lock)
		if err != nil {
			lock.Close()
			return nil, fmt.Errorf("socket %s: %w", path, err)
		}
		if current {
			return func() { os.Remove(name); lock.Close() }, nil
		}
		lock.Close()
	}
}

// lockFile locks a lock file, which must be empty. current is false if the file's last owner has
// removed it, so that its lock is void.
func lockFile(lock *os.File) (current bool, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(lock.Fd()), &st); err != nil {
		return false, os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != 0 {
		return false, fmt.Errorf("%s exists and is not a lock: remove it or choose another path", lock.Name())
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, fmt.Errorf("another process is starting to listen on it: %w", unix.EADDRINUSE)
	}
	if err == nil {
		err = unix.Fstat(int(lock.Fd()), &st)
	}
	return st.Nlink > 0, err
}

func checkListenPath(path string) error {
	if path == "" {
		return errors.New("socket path is empty")
	}
	return checkLength(path)
}

// bindAndShow listens under a temporary name and then renames the socket to path, unless path
// exists by then.
func bindAndShow(fd int, path string) (made fs.FileInfo, err error) {
	passing := path + newSuffix
	if err := unix.Fchmod(fd, 0o600); err != nil { // bind gives the file the mode of the socket
		return nil, os.NewSyscallError("fchmod", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: passing}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	if made, err = os.Lstat(passing); err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, unix.SOMAXCONN))
	}
	if err == nil {
		err = os.NewSyscallError("rename", unix.Renameat2(unix.AT_FDCWD, passing, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE))
	}
	if err != nil {
		os.Remove(passing)
		return nil, err
	}
	return made, nil
}

// Close removes the path, unless another file has it by now, and closes FD.
func (s *UnixSocket) Close() {
	s.Remove()
	unix.Close(s.FD)
	s.FD = -1
}

// Remove removes the path, unless another file has it by now. Use it instead of Close if FD is
// closed already or was passed on.
func (s *UnixSocket) Remove() {
	if now, err := os.Lstat(s.path); err == nil && now.Mode().Type() == fs.ModeSocket && os.SameFile(now, s.made) {
		os.Remove(s.path)
	}
}

// ClaimUnix makes sure that a socket can be made at path, and removes a stale socket, on which
// nothing listens. If anything else exists at path, it stays, and the error names it. The error is
// EADDRINUSE if a process listens there; that process does not notice the check.
func ClaimUnix(path string) error {
	if err := checkListenPath(path); err != nil {
		return err
	}
	return claim(path)
}

func claim(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket: remove it or choose another path", path)
	}
	if err := probe(path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("stale socket: %w", err)
	}
	return nil
}

// probe returns nil if nothing listens at path. It connects with another socket type than the
// listener's: that fails with EPROTOTYPE if there is a listener, and with ECONNREFUSED otherwise.
func probe(path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	defer unix.Close(fd)
	switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); {
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
		return nil
	case err == nil, errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("a running process listens on socket %s: stop the process or choose another path: %w", path, unix.EADDRINUSE)
	default:
		return fmt.Errorf("socket %s: %w", path, err)
	}
}
