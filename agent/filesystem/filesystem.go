// Package filesystem measures and grows mounted filesystems with the kernel's ioctls, and reads the
// errors that they have recorded. It runs no programs, so that a guest image needs neither
// e2fsprogs nor xfsprogs. Each filesystem has a file.
package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

// Mounted is a filesystem that is mounted: its root directory and its block device, both open for
// reading. The caller closes them. Proven is the state that earlier calls of the same caller have
// seen, or nil.
//
// Step, if it is set, is called after each step of a growth with the filesystem's end, in blocks.
type Mounted struct {
	Dir, Disk *os.File
	Proven    *Proven
	Step      func(blocks uint64)
}

// stepped calls Step.
func (m Mounted) stepped(blocks uint64) {
	if m.Step != nil {
		m.Step(blocks)
	}
}

// Open opens the filesystem that is mounted from a device at a mount point. The caller closes it.
func Open(mountPoint, device string, proven *Proven) (Mounted, error) {
	disk, err := openUnpolled(device, 0)
	if err != nil {
		return Mounted{}, err
	}
	dir, err := openUnpolled(mountPoint, unix.O_DIRECTORY)
	if err != nil {
		disk.Close()
		return Mounted{}, err
	}
	return Mounted{Dir: dir, Disk: disk, Proven: proven}, nil
}

// Close closes both files.
func (m Mounted) Close() {
	m.Dir.Close()
	m.Disk.Close()
}

// openUnpolled opens a file for reading. It is os.OpenFile for files that epoll(7) does not take,
// such as disks and directories: os.OpenFile tries that first, which is five system calls more.
func openUnpolled(path string, flags int) (*os.File, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|flags, 0)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), path), nil
		case !errors.Is(err, unix.EINTR):
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		}
	}
}

// Proven is the state that Settle and Grow have seen on a disk. It spares a caller that calls
// again, while the filesystem stays mounted, from checking that state again. It starts empty. Calls
// that use the same Proven must not run at the same time.
type Proven struct {
	blocks uint64 // size in the superblock on the disk, at least
	kept   uint64 // size in the superblock even if the disk loses its cache
	whole  uint64 // the first group whose headers were not yet found to have the full length
	stale  bool   // the superblock of a group may be older than the growth
	// compared is set when the superblock of the last group was compared. Those of the others are
	// compared with their headers.
	compared bool
}

// Again forgets the state that somebody else may have changed since the last call, who may even
// have shrunk the filesystem. No kernel shrinks a group that has others behind it. A write that has
// failed is remembered.
func (p *Proven) Again() {
	p.blocks, p.kept = 0, 0
	if p.whole > 0 {
		p.whole--
	}
}

// Geometry is a filesystem's extent on its device. (statfs does not report it, because it leaves
// out the filesystem's own metadata.)
type Geometry struct {
	BlockSize uint64 // bytes
	Blocks    uint64 // blocks, from the device's start to the filesystem's end
	Slack     uint64 // the largest number of blocks that a growth leaves unused at the end of a device

	// GroupBlocks is the length of an allocation group; 0 if Goal does not need it.
	GroupBlocks uint64
}

// Bytes returns where the filesystem ends on its device.
func (g Geometry) Bytes() uint64 { return g.BlockSize * g.Blocks }

// EndsWithin reports whether a device with this many bytes has all blocks. As in the kernel's check
// at mount time, a rest that is shorter than a block does not count.
func (g Geometry) EndsWithin(device uint64) bool { return g.Blocks <= device/g.BlockSize }

// Type implements one type of filesystem. Every function is set.
type Type struct {
	Name string

	// Geometry reads the extent from the mounted filesystem.
	Geometry func(Mounted) (Geometry, error)

	// OnDisk returns the extent according to the superblock on the disk, without access to the root
	// directory. During a growth it may return an older, smaller extent.
	OnDisk func(disk *os.File) (Geometry, error)

	// Goal returns the end, in blocks, that a request for blocks leads to on a device with room for
	// device blocks. That is blocks, or a little more if only a larger end is safe to request.
	Goal func(g Geometry, blocks, device uint64) uint64

	// CanGrow refuses an end that this filesystem can never have, whatever the device's size. It is
	// called before the device grows, because that cannot be undone.
	CanGrow func(m Mounted, blocks uint64) error

	// Grow makes the filesystem end at blocks, or as near below as the kernel can; Geometry then
	// returns the real end. Grow never shrinks. It works in steps, and when ctx ends it stops
	// between two steps, at a consistent size. The growth so far survives a power cut.
	Grow func(ctx context.Context, m Mounted, blocks uint64) error

	// Settle makes the kernel write the superblock if the one on the disk is older than a growth,
	// whoever has made the growth. It returns when the superblock is on the disk. If ctx ends it, a
	// later call continues from there.
	Settle func(ctx context.Context, m Mounted) error

	// BeforeMount changes the kernel's settings for this type. It is called before each mount.
	BeforeMount func()

	// Checkpoint makes the kernel write what the log has to its places, as an unmount does. If such
	// a write fails, the log is kept for the next mount. It is called before each unmount, and
	// blocks as long as the disk does.
	Checkpoint func(dir *os.File) error

	// Options returns mount options that the filesystem on a disk needs at every mount, or "".
	Options func(disk *os.File) string

	// EndOnDisk returns the filesystem's end, in blocks, according to the superblock on a disk that
	// is not mounted. That end does not include a growth in the log: if it differs from Geometry
	// after the first mount, storage mounts a second time.
	EndOnDisk func(disk *os.File) (uint64, error)

	// UUID returns the UUID in the superblock on a disk. A clone of the disk has the same UUID.
	UUID func(disk *os.File) (string, error)

	// MountRefused explains why the kernel has refused to mount a disk, and the remedy; "" if
	// nothing is known.
	MountRefused func(disk *os.File, err error) string

	// RecordedErrors returns how many errors of this mount or earlier ones the superblock on a disk
	// has recorded; 0 if the type records none.
	RecordedErrors func(disk *os.File) (count uint64, err error)

	// TrimsWhole is set if the filesystem can be trimmed only as a whole.
	TrimsWhole bool

	// Faults describes how faults show and how they are repaired.
	Faults Faults
}

// Faults describes how a type of filesystem shows that it has met a fault while mounted.
type Faults struct {
	// Repair is the command that repairs the filesystem on the detached disk and clears its
	// RecordedErrors.
	Repair string

	// RootFails is set if stat of the root directory, which is in memory, fails with EIO after the
	// filesystem has shut down, and only then.
	RootFails bool

	// StopsReadOnly is set if the kernel may make the filesystem read-only after an error while the
	// mount's flags stay rw.
	StopsReadOnly bool

	// Stopped reports whether the kernel has made the filesystem of a root directory read-only
	// because of an error; it may write to one that takes writes. It is nil if RecordedErrors shows
	// that.
	Stopped func(dir *os.File) bool
}

// LeastBytes is less than the smallest filesystem that is known here. A smaller disk was truncated
// or never had one.
const LeastBytes = 64 << 10

// types are in the order in which Identify tries them: what mounts as ext3 would mount as ext4,
// too.
var types = []Type{ext3, ext4, xfs, btrfs}

// Lookup returns the type that mount(2) and mountinfo call name.
func Lookup(name string) (Type, bool) {
	for _, t := range types {
		if t.Name == name {
			return t, true
		}
	}
	return Type{}, false
}

// Names returns the types that can be mounted and grown.
func Names() []string {
	names := make([]string, len(types))
	for i, t := range types {
		names[i] = t.Name
	}
	return names
}

// Identify returns the name of the type that a disk holds, or "" if it is none of the known types.
func Identify(disk *os.File) string {
	for _, t := range types {
		if _, err := t.EndOnDisk(disk); err == nil {
			return t.Name
		}
	}
	return ""
}

// textOf formats a UUID in its usual form.
func textOf(uuid [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:])
}

// deviceBlocks returns how many blocks fit on the device.
func deviceBlocks(m Mounted, blockSize uint64) (uint64, error) {
	size, err := blockdev.SizeOf(m.Disk)
	return size / blockSize, err
}

// ioctl calls request on the filesystem's root directory. arg points to the structure that request
// needs.
func ioctl(m Mounted, name string, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, m.Dir.Fd(), request, uintptr(arg)); errno != 0 {
		return &fs.PathError{Op: fmt.Sprintf("ioctl(%s)", name), Path: m.Dir.Name(), Err: errno}
	}
	return nil
}
