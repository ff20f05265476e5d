package qemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// directory is a VM's runtime directory. The VM holds a lock on the directory itself (flock(2))
// while it uses it, so the kernel frees the directory when the process that started the VM ends.
// Stale sockets of an ended process are replaced by the next VM.
type directory struct {
	file *os.File
	path string
	made bool
}

// errMoved means that another VM made or removed the directory while this VM was claiming it.
var errMoved = errors.New("it was created or removed while this process locked it")

// claimAttempts is how many other VMs may start or end in the directory while this one starts.
const claimAttempts = 8

// claimDirectory makes the directory with mode 0700, or uses an existing one, and locks it. It
// refuses a directory that belongs to another user or that others may enter, because anyone who can
// connect to the sockets controls the guest. It never changes an existing directory's mode: the
// path may be anything, for example /tmp.
func claimDirectory(path string) (*directory, error) {
	var err error
	for range claimAttempts {
		d := &directory{path: path}
		if err = d.claim(); err == nil {
			return d, nil
		}
		if d.file != nil {
			d.close()
		}
		if !errors.Is(err, errMoved) {
			break
		}
	}
	return nil, fmt.Errorf("runtime directory %s: %w", path, err)
}

func (d *directory) claim() error {
	_, err := os.Lstat(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return d.make()
	}
	if err == nil {
		err = d.open(d.path)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errMoved
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return errNotOurs
	case err != nil:
		return err
	}
	info, err := d.file.Stat()
	if err != nil {
		return err
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); info.Mode().Perm()&0o077 != 0 || !ok || int(owner.Uid) != os.Geteuid() {
		return errNotOurs
	}
	if err := d.lock(); err != nil {
		return err
	}
	if now, err := os.Lstat(d.path); err != nil || !os.SameFile(info, now) {
		return errMoved
	}
	return nil
}

var errNotOurs = errors.New("want a directory that you own with mode 0700, or a path that does not exist yet")

// make makes the directory under a temporary name and renames it, so that the directory is locked
// from the moment it appears.
func (d *directory) make() (err error) {
	passing, err := os.MkdirTemp(filepath.Dir(d.path), filepath.Base(d.path)+".new-")
	if err != nil {
		return err
	}
	if err = d.open(passing); err == nil {
		err = d.lock()
	}
	if err == nil {
		err = unix.Renameat2(unix.AT_FDCWD, passing, unix.AT_FDCWD, d.path, unix.RENAME_NOREPLACE)
	}
	if err != nil {
		os.Remove(passing)
	}
	if errors.Is(err, fs.ErrExist) {
		return errMoved
	}
	d.made = err == nil
	return err
}

func (d *directory) open(path string) (err error) {
	d.file, err = os.OpenFile(path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	return err
}

func (d *directory) lock() error {
	err := unix.Flock(int(d.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return errors.New("a VM runs in it: stop that VM or use another directory")
	}
	return os.NewSyscallError("flock", err)
}

// close unlocks the directory. Closing alone would leave the lock to a process that another
// goroutine starts, which briefly has a copy of the descriptor.
func (d *directory) close() {
	_ = unix.Flock(int(d.file.Fd()), unix.LOCK_UN)
	d.file.Close()
}

// release unlocks the directory. If this VM made the directory and it is empty, release removes it.
func (d *directory) release(log *logrus.Entry) {
	defer d.close()
	if !d.made {
		return
	}
	if err := os.Remove(d.path); errors.Is(err, unix.ENOTEMPTY) {
		left, _ := d.file.Readdirnames(-1)
		log.Warnf("runtime directory %s is kept, because it has other files: %s", d.path, strings.Join(left, ", "))
	} else if err != nil {
		log.WithError(err).Warn("remove the runtime directory")
	}
}
