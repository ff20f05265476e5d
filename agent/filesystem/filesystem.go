// Package filesystem measures and grows mounted filesystems by the kernel's
// own ioctls, and reads the errors they have recorded. No program is run: a
// guest image needs neither e2fsprogs nor xfsprogs. One file a filesystem.
package filesystem

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
)

// Mounted is a filesystem that is mounted: its root and the block device below
// it, both open for reading. They stay the caller's to close. Proven is what the
// caller's earlier calls have seen of it, nil where it keeps nothing.
type Mounted struct {
	Dir, Disk *os.File
	Proven    *Proven
}

// Proven is what Settle and Grow have seen on a disk, for callers that call again while the
// filesystem stays mounted: what was seen is not looked at again. It is empty at first.
type Proven struct {
	blocks uint64 // that the superblock on the disk has, at least
	kept   uint64 // that it has where the disk's own cache is lost, too
	whole  uint64 // the first group whose header's length is still to be looked at
}

// Geometry is a filesystem's extent on its device. (statfs does not tell it:
// it leaves the filesystem's own metadata out.)
type Geometry struct {
	BlockSize uint64 // bytes
	Blocks    uint64 // blocks, from the device's start to the filesystem's end
	Slack     uint64 // the most blocks that growing leaves unused at a device's end

	// GroupBlocks is the length of an allocation group; 0 where Goal needs none.
	GroupBlocks uint64
}

// Bytes is where the filesystem ends on its device.
func (g Geometry) Bytes() uint64 { return g.BlockSize * g.Blocks }

// EndsWithin reports whether a device of so many bytes has all blocks, by the rule that the
// kernel mounts by: a rest that is no whole block is no block.
func (g Geometry) EndsWithin(device uint64) bool { return g.Blocks <= device/g.BlockSize }

// Type is what this package can do with one type of filesystem. Every function is
// set.
type Type struct {
	Name string

	// Geometry reads the extent from the running filesystem.
	Geometry func(Mounted) (Geometry, error)

	// OnDisk is Geometry by the superblock on the disk below, without the filesystem's root:
	// it may be older than a growth that is under way, and smaller.
	OnDisk func(disk *os.File) (Geometry, error)

	// Goal is the end, in blocks, that a request for so many blocks leads to on
	// a device that has room for device blocks: the same, or a little more where
	// only that end can be asked for without a danger.
	Goal func(g Geometry, blocks, device uint64) uint64

	// CanGrow refuses an end that this filesystem can never have, whatever its
	// device's size: asked before the device grows, which it does for good.
	CanGrow func(m Mounted, blocks uint64) error

	// Grow makes the filesystem end at blocks, or as near below as the
	// kernel can; Geometry tells where. It never shrinks. It goes in steps and
	// stops between two of them, at a consistent size, when ctx ends. What it
	// has grown by outlives a power cut.
	Grow func(ctx context.Context, m Mounted, blocks uint64) error

	// Settle has the superblock written, where the one on the disk is older than a
	// growth by Grow, or by somebody else, and returns when it is on the disk. A
	// later call goes on where ctx has ended it.
	Settle func(ctx context.Context, m Mounted) error

	// BeforeMount sets the kernel's settings for this type, before each mount.
	BeforeMount func()

	// Options are mount options that what is on a disk needs, whoever mounts it and how:
	// "" where it needs none.
	Options func(disk *os.File) string

	// EndOnDisk is where the superblock on a disk that is not mounted has the
	// filesystem end, in blocks. A growth in the log is not in it yet: storage
	// mounts a second time where it differs from Geometry after the first mount.
	EndOnDisk func(disk *os.File) (uint64, error)

	// UUID is the filesystem's own name for itself, from the superblock on a disk. A
	// clone has the same.
	UUID func(disk *os.File) (string, error)

	// MountRefused says more about a disk that the kernel has refused to mount,
	// and the way out; "" where nothing is known.
	MountRefused func(disk *os.File, err error) string

	// RecordedErrors returns how many errors the superblock on a disk remembers
	// from this mount or an earlier one: zero where the type keeps no record.
	RecordedErrors func(disk *os.File) (count uint64, err error)

	// Faults is how faults show, and what mends them.
	Faults Faults
}

// Faults is how a type of filesystem shows that it has met a fault while it is mounted.
type Faults struct {
	// Repair is the command that mends it on the detached disk, and makes it forget
	// RecordedErrors.
	Repair string

	// RootFails says that stat of its root, which is in memory, fails with EIO where it has
	// shut down, and for no other reason.
	RootFails bool

	// StopsReadOnly says that after an error the kernel may make it read-only, and its mount
	// not.
	StopsReadOnly bool
}

// LeastBytes is less than any filesystem that is known here takes: a disk that is smaller was
// cut off, or never made.
const LeastBytes = 64 << 10

var types = []Type{ext4, xfs}

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

// Identify returns the name of the type that a disk holds, "" for none of them.
func Identify(disk *os.File) string {
	for _, t := range types {
		if _, err := t.EndOnDisk(disk); err == nil {
			return t.Name
		}
	}
	return ""
}

// textOf is a UUID as people write it.
func textOf(uuid [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:])
}

// deviceBlocks is how many blocks of a size the device below has room for.
func deviceBlocks(m Mounted, blockSize uint64) (uint64, error) {
	size, err := blockdev.SizeOf(m.Disk)
	return size / blockSize, err
}

// ioctl calls request on the filesystem's root with arg, a pointer to a
// structure of the layout that the request has.
func ioctl(m Mounted, name string, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, m.Dir.Fd(), request, uintptr(arg)); errno != 0 {
		return &fs.PathError{Op: fmt.Sprintf("ioctl(%s)", name), Path: m.Dir.Name(), Err: errno}
	}
	return nil
}
