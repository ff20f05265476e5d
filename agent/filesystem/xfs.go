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

// xfs grows by XFS_IOC_FSGROWFSDATA (fs/xfs/libxfs/xfs_fs.h). Two things in
// the kernel can cost a volume, and what is asked for here avoids both:
//
// The kernel obeys a smaller size too, and shrinks, though by no more than the
// last allocation group has. Another grower can come between the look at the
// geometry and the call. So each call asks for the end of a group or for the
// device's end: who is ahead of us then is ahead by a group, which the kernel
// refuses to take away.
//
// Until the primary superblock is on the disk with its new size, which the kernel
// leaves for half a minute, a power cut leaves a log whose recovery meets groups
// beyond the filesystem's end: 6.1 refuses to mount it once, and every kernel each
// time where two growths are in the log, or where a directory that was logged before
// the growth was written with a name in the new groups. So the agent has that
// superblock written right after each step, and begins the next one, and answers,
// when it is there (xfsSettle).
//
// A superblock that has later groups makes what the log has of a short last group
// invalid, since Linux 6.5. So a short last group is first grown to its full length
// alone, and groups are added only when its headers on the disk have that length
// (awaitWhole).
//
// All of this needs the log sequence numbers of version 5: what is newer on the disk,
// recovery leaves alone. An xfs of version 4 is refused.
//
// A growth that is cut off before lies in the log. Where 6.1 recovers it, the
// kernel keeps the old length of the group that was the last one, and fails the
// next growth, unless the filesystem is mounted afresh first (EndOnDisk).
var xfs = Type{
	Name: "xfs", Geometry: xfsGeometry, OnDisk: xfsOnDisk, Goal: xfsGoal, CanGrow: xfsCanGrow, Grow: xfsGrow,
	BeforeMount: xfsHurry, Settle: xfsSettle, Options: func(*os.File) string { return "" },
	RecordedErrors: func(*os.File) (uint64, error) { return 0, nil },
	Faults:         Faults{Repair: "xfs_repair", RootFails: true},
	EndOnDisk:      xfsEndOnDisk,
	UUID:           xfsUUID,
	MountRefused:   xfsMountRefused,
}

const (
	xfsIocFSGeometry   = 0x8100587e // _IOR('X', 126, struct xfs_fsop_geom)
	xfsIocFSGrowFSData = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)

	// XFS_MIN_AG_BLOCKS: a shorter last allocation group is not made.
	xfsMinGroupBlocks = 64

	// One call adds as many groups as there are, and so many at least. Each call
	// rewrites every group's superblock, so few calls are made.
	xfsFewestGroups = 16

	// So many calls in a row may change nothing, before the kernel's answer is
	// no longer believed.
	xfsIdleSteps = 3
)

// xfsGeom is struct xfs_fsop_geom, 256 bytes: blocksize at 0, agblocks at 8,
// sectsize at 20, imaxpct at 28, datablocks at 32,
// flags at 92.
type xfsGeom [256]byte

func (g *xfsGeom) blockSize() uint32   { return binary.NativeEndian.Uint32(g[0:]) }
func (g *xfsGeom) groupBlocks() uint32 { return binary.NativeEndian.Uint32(g[8:]) }
func (g *xfsGeom) sectorSize() uint32  { return binary.NativeEndian.Uint32(g[20:]) }
func (g *xfsGeom) imaxpct() uint32     { return binary.NativeEndian.Uint32(g[28:]) }
func (g *xfsGeom) flags() uint32       { return binary.NativeEndian.Uint32(g[92:]) }
func (g *xfsGeom) dataBlocks() uint64  { return binary.NativeEndian.Uint64(g[32:]) }

// usable returns how many of so many blocks the kernel uses: it makes no last
// group that is too short. Asked for a rest that it leaves out, a kernel older
// than "xfs: short circuit xfs_growfs_data_private() if delta is zero" begins to
// shrink, by nothing.
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
		return errkind.New(errkind.FailedPrecondition, "xfs on %s is of version 4, which a power cut after a growth may cost: copy it to one that mkfs.xfs makes today", m.Disk.Name())
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

// check refuses a geometry that cannot be counted with.
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

// xfsGoal ends at an allocation group's end, or at the device's: see xfs.
func xfsGoal(g Geometry, blocks, device uint64) uint64 {
	if blocks >= device {
		return blocks
	}
	return min(ceil(blocks, g.GroupBlocks)*g.GroupBlocks, device)
}

// xfsGrow looks again after each step: at the geometry, which another grower may
// have changed, and at the device, which may have grown while its end was asked
// for.
//
// The disk is asked once, at the end, to keep what is in its cache, a superblock of
// somebody else's growth and headers that were read there among it. A growth before that
// is in the log no earlier than they are on the disk: the kernel has the disk flush its
// cache before it writes to the log (xlog_cil_push_work in fs/xfs/xfs_log_cil.c).
func xfsGrow(ctx context.Context, m Mounted, blocks uint64) error {
	d, err := openXFSDisk(m)
	if err != nil {
		return err
	}
	defer d.close()
	g, err := readXFSGeom(m)
	if err == nil {
		err = d.settleFound(ctx, g) // somebody else's growth, or one that was cut off
	}
	if err == nil {
		err = d.grow(ctx, blocks)
	}
	if keepErr := d.keep(); err == nil {
		err = keepErr
	}
	return err
}

// grow is xfsGrow of what is settled. It leaves it settled, where it can.
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
	return nil // the caller finds how far it is
}

// groups is how many there are, a short last one among them.
func (g *xfsGeom) groups() uint64 { return ceil(g.dataBlocks(), uint64(g.groupBlocks())) }

// endsWithGroup reports whether the last group has its full length.
func (g *xfsGeom) endsWithGroup() bool { return g.dataBlocks()%uint64(g.groupBlocks()) == 0 }

// step returns where the next call ends on the way to so many blocks: at the end
// of the last group where that is short, else at a later one's, or at the device's.
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

// growTo makes one call, and returns what came of it, settled: a call can fail
// behind its growth.
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
	// Refused for what was asked, or because another grower is ahead by a group.
	if errors.Is(growErr, unix.EINVAL) && after.dataBlocks() >= blocks {
		growErr = nil
	}
	return after, errors.Join(growErr, d.settle(ctx, after))
}
