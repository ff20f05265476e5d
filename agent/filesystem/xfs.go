package filesystem

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// xfs grows by XFS_IOC_FSGROWFSDATA (fs/xfs/libxfs/xfs_fs.h). Two properties of the kernel could
// destroy a volume; the requests made here avoid both.
//
// First, the kernel also accepts a smaller size and shrinks the filesystem, though by no more than
// the last allocation group. Another grower may run between the read of the geometry and the call.
// So each call requests the end of a group or the end of the device: a grower that is ahead is then
// ahead by a whole group, which the kernel refuses to remove.
//
// Second, the kernel writes the primary superblock with its new size only half a minute after a
// growth. A power cut before that leaves a log whose recovery meets groups beyond the filesystem's
// end. Linux 6.1 then refuses to mount the filesystem once. Every kernel refuses each time if two
// growths are in the log, or if a directory that was logged before the growth was written with a
// name in the new groups. So the agent has that superblock written right after each step. It begins
// the next step, and answers, only when the superblock is on the disk (xfsSettle).
//
// Since Linux 6.5, a superblock with later groups makes the log's records of a short last group
// invalid. So a short last group is first grown alone to its full length, and groups are added only
// when its headers on the disk have that length (awaitWhole).
//
// All of this needs the log sequence numbers of version 5, because recovery leaves newer blocks on
// the disk alone. An xfs of version 4 is refused.
//
// An earlier growth that was interrupted is in the log. If Linux 6.1 recovers it, the kernel keeps
// the old length of the former last group and fails the next growth, unless the filesystem is
// mounted a second time first (EndOnDisk).
var xfs = Type{
	Name: "xfs", Geometry: xfsGeometry, OnDisk: xfsOnDisk, Goal: xfsGoal, CanGrow: xfsCanGrow, Grow: xfsGrow,
	BeforeMount: xfsHurry, Checkpoint: noCheckpoint, Settle: xfsSettle, Options: func(*os.File) string { return "" },
	RecordedErrors: func(*os.File) (uint64, error) { return 0, nil },
	Faults:         Faults{Repair: "xfs_repair", RootFails: true},
	EndOnDisk:      xfsEndOnDisk,
	UUID:           xfsUUID,
	MountRefused:   xfsMountRefused,
}

const (
	xfsIocFSGeometry   = 0x8100587e // _IOR('X', 126, struct xfs_fsop_geom)
	xfsIocFSGrowFSData = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)

	// XFS_MIN_AG_BLOCKS: the kernel does not create a shorter last allocation group.
	xfsMinGroupBlocks = 64

	// xfsFewestGroups is the least number of groups that one call adds; it adds as many as there
	// are, if that is more. Each call rewrites the superblock of every group, so the number of
	// calls is kept low.
	xfsFewestGroups = 512

	// xfsIdleSteps is how many calls in a row may change nothing although the kernel reports
	// success.
	xfsIdleSteps = 3
)

// xfsGeom is struct xfs_fsop_geom, 256 bytes: blocksize at 0, agblocks at 8, sectsize at 20,
// imaxpct at 28, datablocks at 32, flags at 92.
type xfsGeom [256]byte

func (g *xfsGeom) blockSize() uint32   { return binary.NativeEndian.Uint32(g[0:]) }
func (g *xfsGeom) groupBlocks() uint32 { return binary.NativeEndian.Uint32(g[8:]) }
func (g *xfsGeom) sectorSize() uint32  { return binary.NativeEndian.Uint32(g[20:]) }
func (g *xfsGeom) imaxpct() uint32     { return binary.NativeEndian.Uint32(g[28:]) }
func (g *xfsGeom) flags() uint32       { return binary.NativeEndian.Uint32(g[92:]) }
func (g *xfsGeom) dataBlocks() uint64  { return binary.NativeEndian.Uint64(g[32:]) }

// usable returns how many of blocks the kernel uses: it does not create a last group that is too
// short. If a request includes such a rest, a kernel older than "xfs: short circuit
// xfs_growfs_data_private() if delta is zero" starts to shrink by zero blocks.
func (g *xfsGeom) usable(blocks uint64) uint64 {
	if rest := blocks % uint64(g.groupBlocks()); rest < xfsMinGroupBlocks {
		return blocks - rest
	}
	return blocks
}

// xfsVersion5 is XFS_FSOP_GEOM_FLAGS_V5SB.
const xfsVersion5 = 1 << 15

func xfsCanGrow(m Mounted, blocks uint64) error {
	g, err := readXFSGeom(m)
	if err != nil {
		return err
	}
	if blocks > g.dataBlocks() && g.flags()&xfsVersion5 == 0 {
		return errkind.New(errkind.FailedPrecondition, "xfs on %s has format version 4, which a power cut after a growth may destroy: copy its files to an xfs that a current mkfs.xfs has made", m.Disk.Name())
	}
	return nil
}

func readXFSGeom(m Mounted) (*xfsGeom, error) {
	var g xfsGeom
	if err := ioctl(m, "XFS_IOC_FSGEOMETRY", xfsIocFSGeometry, unsafe.Pointer(&g)); err != nil {
		return nil, err
	}
	return &g, g.check(m.Disk.Name())
}

// check refuses a geometry with values that would break the arithmetic.
func (g *xfsGeom) check(device string) error {
	if g.blockSize() == 0 || g.groupBlocks() == 0 || g.sectorSize() < 512 || g.sectorSize() > 32<<10 || g.dataBlocks() > (1<<63)/uint64(g.blockSize()) {
		return fmt.Errorf("xfs at %s has %d blocks of %d bytes, %d a group", device, g.dataBlocks(), g.blockSize(), g.groupBlocks())
	}
	return nil
}

func xfsGeometry(m Mounted) (Geometry, error) {
	g, err := readXFSGeom(m)
	if err != nil {
		return Geometry{}, err
	}
	return Geometry{BlockSize: uint64(g.blockSize()), Blocks: g.dataBlocks(), Slack: xfsMinGroupBlocks - 1, GroupBlocks: uint64(g.groupBlocks())}, nil
}

// xfsGoal returns the end of an allocation group, or of the device; see xfs for the reason.
func xfsGoal(g Geometry, blocks, device uint64) uint64 {
	if blocks >= device {
		return blocks
	}
	return min(ceil(blocks, g.GroupBlocks)*g.GroupBlocks, device)
}

// xfsGrow rereads the state after each step: the geometry, which another grower may have changed,
// and the device, which may have grown while its end was requested.
//
// It flushes the disk's cache once, at the end. The cache may hold a superblock and headers that
// were read there, including those of somebody else's growth. A crash before the flush is harmless:
// a growth does not get into the log before they are on the disk, because the kernel makes the disk
// flush its cache before it writes to the log (xlog_cil_push_work in fs/xfs/xfs_log_cil.c).
func xfsGrow(ctx context.Context, m Mounted, blocks uint64) error {
	d, err := openXFSDisk(m)
	if err != nil {
		return err
	}
	defer d.close()
	g, err := readXFSGeom(m)
	if err == nil {
		err = d.settleFound(ctx, g) // somebody else's growth, or an interrupted one
	}
	if err == nil {
		err = d.grow(ctx, blocks)
	}
	if keepErr := d.keep(); err == nil {
		err = keepErr
	}
	return err
}

// grow is xfsGrow for a settled filesystem. It leaves the filesystem settled if it can.
func (d *xfsDisk) grow(ctx context.Context, blocks uint64) error {
	m := d.Mounted
	for idle := 0; idle < xfsIdleSteps; {
		if err := ctx.Err(); err != nil {
			return err
		}
		g, err := readXFSGeom(m)
		if err != nil {
			return err
		}
		device, err := deviceBlocks(m, uint64(g.blockSize()))
		if err != nil {
			return err
		}
		next := g.step(blocks, device)
		if next <= g.dataBlocks() {
			return nil
		}
		if g.endsWithGroup() {
			if err := d.awaitWhole(ctx, g, g.groups()); err != nil {
				return err
			}
		}
		after, err := d.growTo(ctx, g, next)
		if err != nil {
			return fmt.Errorf("grow xfs on %s to %d blocks: %w", m.Disk.Name(), next, err)
		}
		if after.dataBlocks() > g.dataBlocks() {
			m.stepped(after.dataBlocks())
			idle = 0
		} else {
			idle++
		}
		if next == g.usable(device) {
			if blocks, err = deviceBlocks(m, uint64(g.blockSize())); err != nil {
				return err
			}
		}
	}
	return nil // the caller reads the real end
}

// groups returns the number of groups, including a short last one.
func (g *xfsGeom) groups() uint64 { return ceil(g.dataBlocks(), uint64(g.groupBlocks())) }

// endsWithGroup reports whether the last group has its full length.
func (g *xfsGeom) endsWithGroup() bool { return g.dataBlocks()%uint64(g.groupBlocks()) == 0 }

// step returns where the next call ends on the way to blocks: at the end of the last group if that
// is short, else at the end of a later group or of the device.
func (g *xfsGeom) step(blocks, device uint64) uint64 {
	size := uint64(g.groupBlocks())
	groups := g.groups()
	next := groups * size
	if g.endsWithGroup() {
		next += max(xfsFewestGroups, groups) * size
	}
	if last := ceil(blocks, size) * size; next > last {
		next = last
	}
	return g.usable(min(next, device))
}

// growTo makes one call, settles the result and returns the new geometry. A call may fail after it
// has grown the filesystem.
func (d *xfsDisk) growTo(ctx context.Context, g *xfsGeom, blocks uint64) (*xfsGeom, error) {
	m := d.Mounted
	grow := struct { // struct xfs_growfs_data
		newBlocks uint64
		imaxpct   uint32
		_         uint32
	}{newBlocks: blocks, imaxpct: g.imaxpct()}
	growErr := ioctl(m, "XFS_IOC_FSGROWFSDATA", xfsIocFSGrowFSData, unsafe.Pointer(&grow))
	after, err := readXFSGeom(m)
	if err != nil {
		return nil, errors.Join(growErr, err)
	}
	// EINVAL also means that another grower is ahead by a group.
	if errors.Is(growErr, unix.EINVAL) && after.dataBlocks() >= blocks {
		growErr = nil
	}
	if growErr != nil && after.dataBlocks() > g.dataBlocks() { // the superblocks of all groups are written last
		d.Proven.stale = true
	}
	return after, errors.Join(growErr, d.settle(ctx, after))
}
