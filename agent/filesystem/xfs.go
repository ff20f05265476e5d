package filesystem

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"
)

// xfs grows by XFS_IOC_FSGROWFSDATA (fs/xfs/libxfs/xfs_fs.h). The kernel obeys
// a smaller size too, and shrinks: the geometry is read again right before.
var xfs = Type{Name: "xfs", Geometry: xfsGeometry, Grow: xfsGrow, RecordedErrors: func(*os.File) (uint64, string, error) { return 0, "", nil }}

const (
	xfsIocFSGeometry   = 0x8100587e // _IOR('X', 126, struct xfs_fsop_geom)
	xfsIocFSGrowFSData = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)

	// XFS_MIN_AG_BLOCKS: a shorter last allocation group is not made.
	xfsMinGroupBlocks = 64
)

// xfsGeom is struct xfs_fsop_geom, 256 bytes: blocksize at 0, agblocks at 8,
// imaxpct at 28, datablocks at 32.
type xfsGeom [256]byte

func (g *xfsGeom) blockSize() uint32   { return binary.NativeEndian.Uint32(g[0:]) }
func (g *xfsGeom) groupBlocks() uint32 { return binary.NativeEndian.Uint32(g[8:]) }
func (g *xfsGeom) imaxpct() uint32     { return binary.NativeEndian.Uint32(g[28:]) }
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

func readXFSGeom(m Mounted) (*xfsGeom, error) {
	var g xfsGeom
	if err := ioctl(m, "XFS_IOC_FSGEOMETRY", xfsIocFSGeometry, unsafe.Pointer(&g)); err != nil {
		return nil, err
	}
	return &g, g.check(m.Disk.Name())
}

// check refuses a geometry that cannot be counted with.
func (g *xfsGeom) check(device string) error {
	if g.blockSize() == 0 || g.groupBlocks() == 0 || g.dataBlocks() > (1<<63)/uint64(g.blockSize()) {
		return fmt.Errorf("xfs at %s has %d blocks of %d bytes, %d a group", device, g.dataBlocks(), g.blockSize(), g.groupBlocks())
	}
	return nil
}

func xfsGeometry(m Mounted) (Geometry, error) {
	g, err := readXFSGeom(m)
	if err != nil {
		return Geometry{}, err
	}
	return Geometry{BlockSize: uint64(g.blockSize()), Blocks: g.dataBlocks(), Slack: xfsMinGroupBlocks - 1}, nil
}

// xfsGrow is one call: its time follows the allocation groups it adds, two or
// three milliseconds each on a slow machine.
func xfsGrow(ctx context.Context, m Mounted, blocks uint64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	g, err := readXFSGeom(m)
	if err != nil {
		return err
	}
	if blocks = g.usable(blocks); g.dataBlocks() >= blocks {
		return nil
	}
	grow := struct { // struct xfs_growfs_data
		newBlocks uint64
		imaxpct   uint32
		_         uint32
	}{newBlocks: blocks, imaxpct: g.imaxpct()}
	if err := ioctl(m, "XFS_IOC_FSGROWFSDATA", xfsIocFSGrowFSData, unsafe.Pointer(&grow)); err != nil {
		return fmt.Errorf("grow xfs on %s to %d blocks: %w", m.Disk.Name(), blocks, err)
	}
	return nil
}
