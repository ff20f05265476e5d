// Package registry records which store belongs to which owner on this host, so that no two
// sandboxes write the same store under any names. A store is an image file or a block device. It is
// opened once, and from then on identified by its device and inode.
//
// Three means enforce this rule, because none covers every case:
//
//	a lock file for the store, and one for each object that contains its    two sandboxes of this user, through
//	bytes: a partition's disk, the file below a loop device                 any path, link, bind mount or loop device
//	O_EXCL (open(2)) for a block device that is written                     mounts, device-mapper, md, swap, other
//	                                                                        users, a partition beside its disk
//	QEMU's own locks on the bytes of an image (block/file-posix.c)          another QEMU, other users
//
// The lock files are in a directory of mode 0700: /run/directvol/stores for root,
// /tmp/directvol-UID/stores for others. The environment does not change this path, so that all
// sessions and units of a user share it. Other users must not be able to replace the directory or
// one above it. Two users who may both write a file have separate directories, so only the last two
// means work between them. A lock file has a byte for each use (OFD locks of fcntl(2)); several
// readers may share a byte:
//
//	byte 0  the store is read      byte 2  a part of it is read
//	byte 1  it is written          byte 3  a part of it is written
//
// The lock files' locks end with this process. O_EXCL and QEMU's locks end when QEMU has ended too,
// because QEMU has the same open file.
//
// A killed process ends only when its open files are closed, and closing waits for a file's server
// (FUSE, NFS). While the server hangs, the process stays in state D, and so does QEMU. The process
// cannot shorten this. The store stays locked until then, which is correct: its QEMU may still
// write.
package registry

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/host/holders"
)

// Stores holds the lock files of one user.
type Stores struct{ dir string }

// Default returns the Stores of this user.
func Default() *Stores {
	return In(defaultDir(os.Geteuid()))
}

func defaultDir(user int) string {
	if user == 0 {
		return "/run/directvol/stores"
	}
	return "/tmp/directvol-" + strconv.Itoa(user) + "/stores"
}

// In returns Stores whose lock files are in dir. A missing dir is made.
func In(dir string) *Stores { return &Stores{dir} }

// Store is a store that Find has found; after Claim it is open and owned. It is not safe for
// concurrent use.
type Store struct {
	stores *Stores
	path   string
	handle string
	layers []holders.Layer
	block  bool
	found  *os.File // refers to the store without opening it (O_PATH)
	file   *os.File // nil before Claim
	lock   *Lock
}

// Find resolves a path to a store, without opening the store. The caller must close the Store.
func (s *Stores) Find(path string) (*Store, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	// O_PATH only refers to the file: opening a FIFO would block, and opening a tape would wind it.
	fd, err := unix.Open(absolute, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: absolute, Err: err}
	}
	found := os.NewFile(uintptr(fd), absolute)
	layers, block, err := holders.Layers(found)
	if err != nil {
		found.Close()
		return nil, err
	}
	handle := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)
	return &Store{stores: s, path: absolute, handle: handle, layers: layers, block: block, found: found}, nil
}

// Path returns the absolute path by which the store was found. The path may lead elsewhere by now.
func (s *Store) Path() string { return s.path }

// Handle returns a path that always leads to the store itself, even if Path leads elsewhere. It
// works for every process of this user until Close (proc_pid_fd(5)).
func (s *Store) Handle() string { return s.handle }

// Block reports whether the store is a block device and not a file.
func (s *Store) Block() bool { return s.block }

// Same reports whether s and other are the same store, even if found by different paths.
func (s *Store) Same(other *Store) bool { return s.layers[0].Key == other.layers[0].Key }

// Claim opens the store and gives it to the owner until Close. If it is in use, the error is a
// *holders.InUseError, which names the users if they can be found. Several read-only claims may
// share a store.
func (s *Store) Claim(owner string, readOnly bool) (err error) {
	defer func() {
		if err != nil {
			s.release()
		}
	}()
	if s.lock, err = s.stores.lock(s.path, s.layers, owner, readOnly); err != nil {
		return err
	}
	flags := unix.O_RDONLY
	if !readOnly {
		flags = unix.O_RDWR
		if s.block {
			flags |= unix.O_EXCL
		}
	}
	// The store is opened by its descriptor, because the path may lead elsewhere by now.
	fd, err := unix.Open("/proc/self/fd/"+strconv.Itoa(int(s.found.Fd())), flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.EBUSY) {
		return s.inUse("this host uses it exclusively: by a mount, device-mapper, md, swap, a QEMU, or a partition of it")
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: s.path, Err: err}
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		unix.Close(fd)
		return &os.PathError{Op: "fcntl", Path: s.path, Err: err}
	}
	s.file = os.NewFile(uintptr(fd), s.path)
	if err := s.unchanged(); err != nil {
		return err
	}
	if readOnly {
		return nil // QEMU itself refuses an image that another process writes
	}
	holder, err := holders.Locked(s.file)
	if err == nil && holder != nil {
		err = s.inUse(holder.How)
	}
	return err
}

// unchanged checks that the opened store has the layers that were locked. A loop device could have
// been attached to another file before it was opened; while open, it keeps its file.
func (s *Store) unchanged() error {
	layers, _, err := holders.Layers(s.file)
	if err == nil && !slices.Equal(layers, s.layers) {
		err = fmt.Errorf("store %s was replaced by another file or device while it was opened: try again", s.path)
	}
	return err
}

// inUse returns the refusal of a store in use. It names the users if a search finds any.
func (s *Store) inUse(how string) error {
	in := &holders.InUseError{Disk: s.path, Holders: []holders.Holder{{How: how}}}
	disk, err := holders.Open("/proc/self/fd/" + strconv.Itoa(int(s.found.Fd())))
	if err != nil {
		return in
	}
	defer disk.Close()
	except := func(pid int) bool { return pid == os.Getpid() && s.file != nil } // this process has the store open itself
	if found, err := disk.Find(except); err == nil && len(found.Holders) > 0 {
		in.Holders = found.Holders
	}
	return in
}

// File returns the open store; nil before Claim. The Store owns the file. File may be called
// concurrently with Close; the file is then closed. QEMU gets a descriptor of the same open file.
func (s *Store) File() *os.File { return s.file }

// Bytes returns the size of the open store, read by its descriptor.
func (s *Store) Bytes() (uint64, error) {
	end, err := s.file.Seek(0, io.SeekEnd) // fstat returns no size for a block device
	if err != nil {
		return 0, fmt.Errorf("size of store %s: %w", s.path, err)
	}
	return uint64(end), nil
}

// release closes the store and releases its locks. QEMU has no block node on it any more, or has
// ended.
func (s *Store) release() {
	if s.file != nil {
		// QEMU's locks are on the open file that it shares with this process. Closing alone would
		// leave them to a process that another goroutine starts, which briefly has a copy of the
		// descriptor.
		_ = unix.FcntlFlock(s.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
		s.file.Close() // this process writes nothing; QEMU does
	}
	if s.lock != nil {
		s.lock.Release()
		s.lock = nil
	}
}

// Close releases the store. It may be called more than once.
func (s *Store) Close() {
	s.release()
	s.found.Close()
}
