// Package holders finds out who on this host has a disk, and keeps others from
// it: before a disk is written to outside of its sandbox, nobody may have it. A
// disk is an image file or a block device. It is opened once, and known by its
// device number or inode from then on: what its name leads to later is of no
// concern.
//
// The package asks for the open files of every process (proc(5)), the locks on the file
// (F_OFD_GETLK of fcntl(2), among them those of QEMU's block/file-posix.c), mounts,
// swap, loop devices, and what the kernel keeps below a block device
// (/sys/dev/block, O_EXCL of open(2)).
//
// It does not see a process in another PID namespace than this /proc shows, one
// that only maps the file or has passed it to io_uring or to a socket's queue, the
// kernel's own file servers (LIO, nfsd), and other hosts that use a shared disk. It
// does not stop a program that opens the disk and asks for no lock.
package holders

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// identity is what a disk is, by whatever name: an inode of a filesystem, or a
// block device (whose inode is 0).
type identity struct{ device, inode uint64 }

// identityOf returns what a status is of, false where that is no disk.
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

// statx asks nobody but this host's kernel, where a network file system may hang,
// and mounts nothing.
func statx(dir int, path string, flags int) (*unix.Statx_t, error) {
	st := new(unix.Statx_t)
	err := unix.Statx(dir, path, flags|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE|unix.STATX_INO, st)
	return st, err
}

// Disk is a disk that is open. It is not safe for concurrent use.
type Disk struct {
	name  string
	file  *os.File // for reading, after Claim for writing too
	taken *os.File // of a block device that is taken exclusively
	block bool
	id    identity
}

// Open opens a disk for reading, through symbolic links. It changes nothing, and
// says of anything but a file or a block device what it is.
func Open(name string) (*Disk, error) {
	// A descriptor that only names it: opening a FIFO waits, opening a tape winds.
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

// wayIn is what can be done about a disk that does not open.
func wayIn(err error) string {
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return ": run this as root, or as the one whom the disk belongs to"
	case errors.Is(err, unix.EROFS):
		return ": it is read-only, or lies on a filesystem that is: make that writable, or copy the disk to where it can be written to"
	default:
		return ""
	}
}

// reopen opens what a descriptor stands for, and not what its name leads to now.
func (d *Disk) reopen(fd int, flags int) (*os.File, error) {
	again, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(again), d.name), nil
}

// Name is what the disk was opened by.
func (d *Disk) Name() string { return d.name }

// File is the open disk, which stays the Disk's. It is another one after Claim.
func (d *Disk) File() *os.File { return d.file }

// Path leads other processes of the same user to this very disk, until it is closed.
func (d *Disk) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), d.file.Fd()) }

// has reports whether a descriptor of this process is the Disk's.
func (d *Disk) has(fd string) bool {
	return fd == strconv.Itoa(int(d.file.Fd())) || d.taken != nil && fd == strconv.Itoa(int(d.taken.Fd()))
}

// Close lets go of the disk.
func (d *Disk) Close() error {
	d.Yield()
	// A process that another goroutine begins has a copy of the descriptor for a moment, and with it the locks.
	return errors.Join(d.Unlock(), d.file.Close())
}

// InUseError is the refusal of a disk that others have.
type InUseError struct {
	// Disk is its name, and Holders are one or more.
	Disk    string
	Holders []Holder
}

// Error names all who have it.
func (e *InUseError) Error() string {
	text := "disk " + e.Disk + " is in use"
	for i, h := range e.Holders {
		text += []string{": ", ", and "}[min(i, 1)] + h.String()
	}
	return text
}

// Claim opens the disk for writing and keeps others from it: a block device is
// opened exclusively, so that it cannot be mounted, nor taken by device-mapper, md,
// swap or another exclusive opener; and all of QEMU's lock bytes are locked, which
// refuses every QEMU that locks, and another Claim. One that others have is an
// *InUseError.
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

// writable refuses a block device that is set read-only: root may open it for
// writing all the same, and learns of it by the first write.
func (d *Disk) writable() error {
	if !d.block {
		return nil
	}
	readOnly, err := unix.IoctlGetInt(int(d.file.Fd()), unix.BLKROGET)
	if err != nil {
		return fmt.Errorf("ask whether disk %s is read-only: %w", d.name, err)
	}
	if readOnly != 0 {
		return fmt.Errorf("disk %s is a read-only device: make it writable first (blockdev --setrw %s, or losetup without --read-only), or copy it to where it can be written to", d.name, d.name)
	}
	return nil
}

// Named is nil where the disk's name still leads to it. Otherwise the error says
// what has become of the disk.
func (d *Disk) Named() error {
	if st, err := statx(unix.AT_FDCWD, d.name, 0); err == nil {
		if id, ok := identityOf(st); ok && id == d.id {
			return nil
		}
	} else if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("look whether %s still is the disk that was opened: %w", d.name, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(d.file.Fd()), &st); err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	if !d.block && st.Nlink == 0 {
		return fmt.Errorf("%s was removed or replaced meanwhile, and the file that was opened has no name any more: its bytes are gone when this program has ended", d.name)
	}
	now, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(d.file.Fd())))
	if err != nil {
		return fmt.Errorf("disk %s: %w", d.name, err)
	}
	return fmt.Errorf("%s leads to something else by now: the disk that was opened is %s", d.name, Printable(now))
}

// Take opens a block device exclusively, where it is not so already. Claim does it
// too: Take is for after a Yield.
func (d *Disk) Take() error {
	if !d.block || d.taken != nil {
		return nil
	}
	taken, err := d.reopen(int(d.file.Fd()), os.O_RDONLY|unix.O_EXCL)
	if err == unix.EBUSY {
		return d.inUse(Holder{How: "something of this host's kernel has it for itself: a mount, perhaps in another mount namespace, device-mapper, md or swap"})
	}
	if err != nil {
		return fmt.Errorf("take disk %s: %w%s", d.name, err, wayIn(err))
	}
	d.taken = taken
	return nil
}

// Yield gives up the exclusive opening of a block device, for a program that opens
// it exclusively itself, as e2fsck does. The locks on QEMU's bytes stay. Until that
// program has opened it, and after it has closed it, another may come first: a mount
// or device-mapper. Then the program is refused, or Take is.
func (d *Disk) Yield() {
	if d.taken != nil {
		d.taken.Close() // nothing was written by it
		d.taken = nil
	}
}

// Lock locks QEMU's bytes of a disk that was claimed, again.
func (d *Disk) Lock() error {
	if holder, err := d.locked(); err != nil || holder != nil {
		if err == nil {
			err = d.inUse(*holder)
		}
		return err
	}
	// Exclusive, and so in one step: of two who come at once, one is refused.
	err := unix.FcntlFlock(d.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: firstLock, Len: afterLocks - firstLock})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return d.inUse(Holder{How: "somebody has locked it this moment"})
	}
	if err != nil {
		return fmt.Errorf("lock disk %s: %w", d.name, err)
	}
	return nil
}

// Unlock lets a QEMU in that is to have the disk. It takes locks of its own when a
// device uses the disk: between the two another QEMU may come first, and then ours
// is refused.
func (d *Disk) Unlock() error {
	err := unix.FcntlFlock(d.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK, Start: firstLock, Len: afterLocks - firstLock})
	if err != nil {
		return fmt.Errorf("unlock disk %s: %w", d.name, err)
	}
	return nil
}

func (d *Disk) inUse(holders ...Holder) error { return &InUseError{d.name, holders} }

// The bytes that QEMU locks (block/file-posix.c): 100 and up say what a process
// does with the image, 200 and up what it does not share, a bit of BLK_PERM_* each.
const (
	firstLock  = 100
	afterLocks = 264
)

// locked returns who has a lock on the disk, nil where nobody has.
func (d *Disk) locked() (*Holder, error) { return Locked(d.file) }
