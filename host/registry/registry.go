// Package registry knows who owns which store on this host, so that no two sandboxes write one, by whatever names. A store is an
// image file or a block device. It is opened once, and known by its device and inode from then on.
//
// The rule is kept by three means, as none of them covers everything:
//
//	a lock file for the store, and one for each thing that holds its bytes:   two sandboxes of this user, through
//	the disk of a partition, the file below a loop device                     any path, link, bind mount or loop device
//	O_EXCL (open(2)) of a block device that is written                        mounts, device-mapper, md, swap, other
//	                                                                          users, a partition beside its disk
//	QEMU's own locks on the bytes of an image (block/file-posix.c)            a QEMU that is not ours, other users
//
// The lock files lie in a directory of mode 0700: /run/directvol/stores for root, /tmp/directvol-UID/stores for others, whatever the
// environment says, so that a login and a unit of one user have the same. Nobody else may be able to replace it, from the root down.
// Two users who may both write a file have a directory each, and only the last two means between them. A lock file holds a byte for
// each use (OFD locks of fcntl(2)), which two may share where all only read:
//
//	byte 0  the store is read      byte 2  a part of it is read
//	byte 1  it is written          byte 3  a part of it is written
//
// The locks end with the process, O_EXCL and QEMU's when QEMU has ended too, as it has the same open file.
//
// A process that is killed ends when its open files are closed, which waits for the server of a file (FUSE, NFS): it stays, in state D,
// for as long as that hangs, and so does QEMU. Nothing in the process can shorten this. The store stays its own until then, and
// should: its QEMU may still write.
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

// Stores is the lock files of one user.
type Stores struct{ dir string }

// Default returns this user's.
func Default() *Stores {
	return In(defaultDir(os.Geteuid()))
}

func defaultDir(user int) string {
	if user == 0 {
		return "/run/directvol/stores"
	}
	return "/tmp/directvol-" + strconv.Itoa(user) + "/stores"
}

// In returns those below a directory, which is made where it is not there.
func In(dir string) *Stores { return &Stores{dir} }

// Store is a store that is found, and after Claim open and owned. It is not safe for concurrent use.
type Store struct {
	stores *Stores
	path   string
	handle string
	layers []holders.Layer
	block  bool
	found  *os.File // names it (O_PATH), and reads nothing
	file   *os.File // nil before Claim
	lock   *Lock
}

// Find finds out what a path leads to, and opens nothing yet. The caller closes the Store.
func (s *Stores) Find(path string) (*Store, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	// Opening a FIFO waits, opening a tape winds: a descriptor that only names it does neither.
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

// Path returns the path by which the store was found, absolute. It may lead elsewhere by now.
func (s *Store) Path() string { return s.path }

// Handle returns a path that leads to the store itself, whatever its own path leads to by now, for every process of this user until
// Close (proc_pid_fd(5)).
func (s *Store) Handle() string { return s.handle }

// Block reports whether the store is a block device, else it is a file.
func (s *Store) Block() bool { return s.block }

// Same reports whether two are one store, by whatever paths.
func (s *Store) Same(other *Store) bool { return s.layers[0].Key == other.layers[0].Key }

// Claim opens the store and makes it the owner's until Close. One that others have is a *holders.InUseError, which names them
// where they can be found. Read-only claims share a store with one another.
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
	// By its descriptor: the path may lead elsewhere by now.
	fd, err := unix.Open("/proc/self/fd/"+strconv.Itoa(int(s.found.Fd())), flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.EBUSY) {
		return s.inUse("something of this host has it for itself: a mount, device-mapper, md, swap, a QEMU, or a partition of it")
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
		return nil // QEMU sees to it that nobody writes what it reads
	}
	holder, err := holders.Locked(s.file)
	if err == nil && holder != nil {
		err = s.inUse(holder.How)
	}
	return err
}

// unchanged makes sure that what is open is what was locked: a loop device may have been put over another file before it was
// opened, and keeps its file while it is open.
func (s *Store) unchanged() error {
	layers, _, err := holders.Layers(s.file)
	if err == nil && !slices.Equal(layers, s.layers) {
		err = fmt.Errorf("store %s was put over another file or device while it was opened: try again", s.path)
	}
	return err
}

// inUse is the refusal of a store that others have, by their names where a look around finds any.
func (s *Store) inUse(how string) error {
	in := &holders.InUseError{Disk: s.path, Holders: []holders.Holder{{How: how}}}
	disk, err := holders.Open("/proc/self/fd/" + strconv.Itoa(int(s.found.Fd())))
	if err != nil {
		return in
	}
	defer disk.Close()
	except := func(pid int) bool { return pid == os.Getpid() && s.file != nil } // its own descriptor
	if found, err := disk.Find(except); err == nil && len(found.Holders) > 0 {
		in.Holders = found.Holders
	}
	return in
}

// File returns the open store, which stays the Store's; nil before Claim. It may be called beside Close, and is closed then. QEMU gets a descriptor of the same open file.
func (s *Store) File() *os.File { return s.file }

// Bytes returns the size of the open store as its descriptor says it.
func (s *Store) Bytes() (uint64, error) {
	end, err := s.file.Seek(0, io.SeekEnd) // of a block device fstat knows none
	if err != nil {
		return 0, fmt.Errorf("size of store %s: %w", s.path, err)
	}
	return uint64(end), nil
}

// release gives up what Claim has taken.
func (s *Store) release() {
	if s.file != nil {
		s.file.Close() // what is written is written by QEMU
	}
	if s.lock != nil {
		s.lock.Release()
		s.lock = nil
	}
}

// Close lets go of the store. It may be called more than once.
func (s *Store) Close() {
	s.release()
	s.found.Close()
}
