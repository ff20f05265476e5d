// Package holders finds the users of a disk on this host, and keeps others from the disk. Before a
// disk is written outside of its sandbox, nothing else may use it. A disk is an image file or a
// block device. It is opened once, and from then on it is identified by its device number or inode:
// a later change of its name has no effect.
//
// The package examines the open files of every process (proc(5)), the locks on the file
// (F_OFD_GETLK of fcntl(2), including those of QEMU's block/file-posix.c), mounts, swap, loop
// devices, and the kernel's data about a block device (/sys/dev/block, O_EXCL of open(2)).
//
// It does not see: a process in a PID namespace that this /proc does not show; a process that only
// maps the file, or that has passed it to io_uring or into a socket's queue; the kernel's own file
// servers (LIO, nfsd); other hosts that use a shared disk. It does not stop a program that opens
// the disk without asking for a lock.
package holders

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// identity identifies a disk regardless of its names: an inode of a filesystem, or a block device
// (with inode 0).
type identity struct{ device, inode uint64 }

// identityOf returns the identity for a file's status, and false if the file is not a disk.
func identityOf(st *unix.Statx_t) (identity, bool) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return identity{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino}, true
	case unix.S_IFBLK:
		return identity{unix.Mkdev(st.Rdev_major, st.Rdev_minor), 0}, true
	default:
		return identity{}, false
	}
}

// statx reads a file's status from this host's kernel only, because the server of a network file
// system may hang. It mounts nothing.
func statx(dir int, path string, flags int) (*unix.Statx_t, error) {
	st := new(unix.Statx_t)
	err := unix.Statx(dir, path, flags|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE|unix.STATX_INO, st)
	return st, err
}

// Disk is an open disk. It is not safe for concurrent use.
type Disk struct {
	name  string
	file  *os.File // for reading; after Claim also for writing
	taken *os.File // an exclusively opened block device
	block bool
	id    identity
}

// Open opens a disk for reading and follows symbolic links. It changes nothing. If name is neither
// a file nor a block device, the error says what it is.
func Open(name string) (*Disk, error) {
	// O_PATH only refers to the file: opening a FIFO would block, and opening a tape would wind it.
	fd, err := unix.Open(name, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	st, err := statx(fd, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, &os.PathError{Op: "statx", Path: name, Err: err}
	}
	id, ok := identityOf(st)
	if !ok {
		return nil, fmt.Errorf("%s is %s: a disk is an image file or a block device", name, kindOf(st.Mode))
	}
	d := &Disk{name: name, block: st.Mode&unix.S_IFMT == unix.S_IFBLK, id: id}
	if d.file, err = d.reopen(fd, os.O_RDONLY); err != nil {
		return nil, fmt.Errorf("read disk %s: %w%s", name, err, wayIn(err))
	}
	return d, nil
}

func kindOf(mode uint16) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "a directory"
	case unix.S_IFCHR:
		return "a character device"
	case unix.S_IFIFO:
		return "a FIFO"
	case unix.S_IFSOCK:
		return "a socket"
	default:
		return "neither a file nor a block device"
	}
}

// wayIn returns advice for a disk that cannot be opened.
func wayIn(err error) string {
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return ": run this as root or as the disk's owner"
	case errors.Is(err, unix.EROFS):
		return ": the disk or its filesystem is read-only: make it writable, or copy the disk to a writable place"
	default:
		return ""
	}
}

// reopen opens the file to which a descriptor refers, even if its name now leads elsewhere.
func (d *Disk) reopen(fd int, flags int) (*os.File, error) {
	again, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(again), d.name), nil
}

// Name returns the name under which the disk was opened.
func (d *Disk) Name() string { return d.name }

// File returns the open disk. The Disk owns the file, and Claim replaces it.
func (d *Disk) File() *os.File { return d.file }

// Path returns a path by which other processes of this user can open this very disk, until it is
// closed.
func (d *Disk) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), d.file.Fd()) }

// has reports whether a descriptor of this process belongs to the Disk.
func (d *Disk) has(fd string) bool {
	return fd == strconv.Itoa(int(d.file.Fd())) || d.taken != nil && fd == strconv.Itoa(int(d.taken.Fd()))
}

// Close closes the disk and releases its locks.
func (d *Disk) Close() error {
	d.Yield()
	// A process that another goroutine is starting briefly has a copy of the descriptor, and the
	// locks with it. So Close unlocks explicitly.
	return errors.Join(d.Unlock(), d.file.Close())
}

// InUseError is the refusal of a disk that is in use.
type InUseError struct {
	// Disk is the disk's name. Holders lists at least one holder.
	Disk    string
	Holders []Holder
}

// Error names all holders.
func (e *InUseError) Error() string {
	text := "disk " + e.Disk + " is in use"
	for i, h := range e.Holders {
		text += []string{": ", ", and "}[min(i, 1)] + h.String()
	}
	return text
}

// Claim opens the disk for writing and keeps others from it. It opens a block device exclusively,
// so that the device cannot be mounted or taken by device-mapper, md, swap or another exclusive
// opener. It locks all of QEMU's lock bytes, so that every QEMU that uses locks is refused, and
// every other Claim. If the disk is in use, the error is an *InUseError.
func (d *Disk) Claim() error {
	if err := d.Take(); err != nil {
		return err
	}
	if err := d.writable(); err != nil {
		return err
	}
	file, err := d.reopen(int(d.file.Fd()), os.O_RDWR)
	if err != nil {
		return fmt.Errorf("open disk %s for writing: %w%s", d.name, err, wayIn(err))
	}
	d.file.Close()
	d.file = file
	return d.Lock()
}

// writable refuses a block device that is set read-only. Otherwise root could open it for writing,
// and only the first write would fail.
func (d *Disk) writable() error {
	if !d.block {
		return nil
	}
	readOnly, err := unix.IoctlGetInt(int(d.file.Fd()), unix.BLKROGET)
	if err != nil {
		return fmt.Errorf("ask whether disk %s is read-only: %w", d.name, err)
	}
	if readOnly != 0 {
		return fmt.Errorf("disk %s is a read-only device: make it writable first (blockdev --setrw %s, or losetup without --read-only), or copy it to a writable place", d.name, d.name)
	}
	return nil
}

// Named returns nil if the disk's name still leads to the disk. Otherwise the error says what has
// become of the disk.
func (d *Disk) Named() error {
	if st, err := statx(unix.AT_FDCWD, d.name, 0); err == nil {
		if id, ok := identityOf(st); ok && id == d.id {
			return nil
		}
	} else if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("check whether %s is still the disk that was opened: %w", d.name, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(d.file.Fd()), &st); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	if !d.block && st.Nlink == 0 {
		return fmt.Errorf("%s was removed or replaced meanwhile, and the opened file has no name any more: its contents are lost when this program ends", d.name)
	}
	now, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(d.file.Fd())))
	if err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	return fmt.Errorf("%s now leads to another file: the disk that was opened is %s", d.name, Printable(now))
}

// Take opens a block device exclusively, unless it is already. Claim calls Take; call it only after
// a Yield.
func (d *Disk) Take() error {
	if !d.block || d.taken != nil {
		return nil
	}
	taken, err := d.reopen(int(d.file.Fd()), os.O_RDONLY|unix.O_EXCL)
	if err == unix.EBUSY {
		return d.inUse(Holder{How: "this host's kernel uses it exclusively: by a mount, perhaps in another mount namespace, device-mapper, md or swap"})
	}
	if err != nil {
		return fmt.Errorf("take disk %s: %w%s", d.name, err, wayIn(err))
	}
	d.taken = taken
	return nil
}

// Yield ends the exclusive opening of a block device, for a program that opens the device
// exclusively itself, as e2fsck does. The locks on QEMU's bytes stay. Before that program has
// opened the device, and after it has closed it, another user may take it first: a mount or
// device-mapper. Then the program fails, or Take does.
func (d *Disk) Yield() {
	if d.taken != nil {
		d.taken.Close() // nothing was written through this descriptor
		d.taken = nil
	}
}

// Lock locks QEMU's bytes of a claimed disk again after an Unlock.
func (d *Disk) Lock() error {
	if holder, err := d.locked(); err != nil || holder != nil {
		if err == nil {
			err = d.inUse(*holder)
		}
		return err
	}
	// An exclusive lock on all bytes is taken in one step, so that one of two concurrent callers is
	// refused.
	err := unix.FcntlFlock(d.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: firstLock, Len: afterLocks - firstLock})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return d.inUse(Holder{How: "another process has just locked it"})
	}
	if err != nil {
		return fmt.Errorf("lock disk %s: %w", d.name, err)
	}
	return nil
}

// Unlock releases the locks for a QEMU that is about to use the disk. The intended QEMU takes its
// own locks only when a device uses the disk. In between, another QEMU may lock the disk first, and
// the intended one is then refused.
func (d *Disk) Unlock() error {
	err := unix.FcntlFlock(d.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Start: firstLock, Len: afterLocks - firstLock})
	if err != nil {
		return fmt.Errorf("unlock disk %s: %w", d.name, err)
	}
	return nil
}

func (d *Disk) inUse(holders ...Holder) error { return &InUseError{d.name, holders} }

// The bytes that QEMU locks (block/file-posix.c), one bit of BLK_PERM_* each: bytes from 100 on
// stand for what a process does with the image, bytes from 200 on for what it does not share.
const (
	firstLock  = 100
	afterLocks = 264
)

// locked returns the holder of a lock on the disk, or nil.
func (d *Disk) locked() (*Holder, error) { return Locked(d.file) }
