package filesystem

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"unsafe"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

// mountedXFS mounts an xfs of 320 MiB whose last group is short, on a disk of 480 MiB.
func mountedXFS(t *testing.T) Mounted {
	t.Helper()
	image, dir := mounttest.Image(t, "xfs", "-d", "agsize=76m"), mounttest.Dir(t)
	disk := mounttest.Attach(t, image)
	mounttest.SetSize(t, disk, image, 480<<20)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	return Mounted{Dir: open(t, dir), Disk: open(t, disk)}
}

// growBySomebodyElse grows an xfs to the end of its disk in one call, and writes its superblock.
func growBySomebodyElse(t *testing.T, m Mounted) *xfsGeom {
	t.Helper()
	g, err := readXFSGeom(m)
	if err != nil {
		t.Fatal(err)
	}
	grow := struct {
		newBlocks  uint64
		imaxpct, _ uint32
	}{480 << 20 / uint64(g.blockSize()), g.imaxpct(), 0}
	if err := ioctl(m, "XFS_IOC_FSGROWFSDATA", xfsIocFSGrowFSData, unsafe.Pointer(&grow)); err != nil {
		t.Fatal(err)
	}
	if err := xfsWriteSuper(m); err != nil {
		t.Fatal(err)
	}
	after, err := readXFSGeom(m)
	if err != nil {
		t.Fatal(err)
	}
	return after
}

// Somebody else has grown an xfs beyond a short last group. The superblock on the disk has the new
// groups, and the log may have the short headers. Settle waits until the headers are written.
func TestGroupsOfSomebodyElsesGrowthAreWholeOnceSettled(t *testing.T) {
	m := mountedXFS(t)
	g := growBySomebodyElse(t, m)
	d, err := openXFSDisk(m)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	const short = 4
	super, err := d.super()
	if whole, headerErr := d.isWhole(g, short); whole || super.blocks != g.dataBlocks() || errors.Join(err, headerErr) != nil {
		t.Fatalf("on the disk\nwant %d blocks, group %d short\ngot  %d blocks, whole %v, error %v", g.dataBlocks(), short, super.blocks, whole, errors.Join(err, headerErr))
	}
	m.Proven = &Proven{}
	if err := xfsSettle(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	for group := range g.groups() - 1 {
		if whole, err := d.isWhole(g, group); !whole || err != nil {
			t.Errorf("settled, group %d\nwant it whole\ngot  %v, error %v", group, whole, err)
		}
	}
}

// The superblock of a group was not written in a growth: xfsSettle writes all of them again,
// although the primary one has the size, and fails as long as that fails.
func TestSuperblocksAreWrittenAgainAfterAFailure(t *testing.T) {
	m := mountedXFS(t)
	m.Proven = &Proven{}
	if err := xfsSettle(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	m.Proven.stale = true
	elsewhere := m
	elsewhere.Dir = open(t, "/proc") // which has no label to set
	g, err := readXFSGeom(m)
	if err != nil {
		t.Fatal(err)
	}
	d, err := openXFSDisk(elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if err := d.settleFound(t.Context(), g); err == nil || !m.Proven.stale {
		t.Errorf("they cannot be written\nwant an error, and them to be stale\ngot  %v, and stale %v", err, m.Proven.stale)
	}
	if err := xfsSettle(t.Context(), m); err != nil || m.Proven.stale {
		t.Errorf("they can be written\nwant no error, and nothing stale\ngot  %v, and stale %v", err, m.Proven.stale)
	}
}

// The superblock of one group has an old size: a growth was cut off before the kernel wrote it, or
// it could not be written, and the volume was mounted again since. xfs_repair would make the
// filesystem as small as it says.
func TestCopiesThatAGrowthDidNotWriteAreWrittenOnceSettled(t *testing.T) {
	const group, groups = 76 << 20, 20
	image, dir := makeXFS(t, groups*group, "-d", "agsize=76m"), mounttest.Dir(t)
	disk := mounttest.Attach(t, image)
	mounttest.Mount(t, disk, dir, "xfs", 0, "")
	g, err := readXFSGeom(Mounted{Dir: open(t, dir), Disk: open(t, disk)})
	if err != nil || g.groups() != groups {
		t.Fatalf("want %d groups\ngot  %d, error %v", groups, g.groups(), err)
	}
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, old := range []int64{1, groups - 2, groups - 1} {
		if _, err := file.WriteAt(binary.BigEndian.AppendUint64(nil, g.dataBlocks()/2), old*group+8); err != nil {
			t.Fatal(err)
		}
		if err := xfsSettle(t.Context(), Mounted{Dir: open(t, dir), Disk: open(t, disk), Proven: &Proven{}}); err != nil {
			t.Fatal(err)
		}
		if s, err := readXFSSuper(file, uint64(old*group)); err != nil || s.blocks != g.dataBlocks() {
			t.Errorf("group %d\nwant %d blocks\ngot  %d, error %v", old, g.dataBlocks(), s.blocks, err)
		}
	}
}

// A later call of the same caller reads no group again but the last one that it had proven: a group
// that is the last one may be made shorter. A call without time stops, and the next one goes on.
func TestGroupsAreReadOnceForAllCalls(t *testing.T) {
	const group, groups = 76 << 20, 16
	image := makeXFS(t, groups*group, "-d", "agsize=76m")
	m := Mounted{Dir: open(t, t.TempDir()), Disk: open(t, image), Proven: &Proven{}}
	d, err := openXFSDisk(m)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	var g xfsGeom
	binary.NativeEndian.PutUint32(g[0:], 4096)
	binary.NativeEndian.PutUint32(g[8:], group/4096)
	binary.NativeEndian.PutUint32(g[20:], 512)
	binary.NativeEndian.PutUint64(g[32:], groups*group/4096)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.settleFound(over, &g); !errors.Is(err, context.Canceled) {
		t.Errorf("no time\nwant it to stop\ngot  %v", err)
	}
	if err := d.settleFound(t.Context(), &g); err != nil || d.Proven.whole != groups-1 {
		t.Errorf("want %d groups proven\ngot  %d, error %v", groups-1, d.Proven.whole, err)
	}
	shorten := func(number int64) {
		t.Helper()
		file, err := os.OpenFile(image, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if _, err := file.WriteAt([]byte{0, 0, 0, 99}, number*group+512+12); err != nil {
			t.Fatal(err)
		}
		if err := file.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	shorten(groups - 3)
	m.Proven.Again()
	if err := d.settleFound(t.Context(), &g); err != nil {
		t.Errorf("a group that was proven before was read again: %v", err)
	}
	shorten(groups - 2)
	m.Proven.Again()
	limited, end := context.WithTimeout(t.Context(), wholeLook)
	defer end()
	if err := d.settleFound(limited, &g); !errors.Is(err, context.DeadlineExceeded) || m.Proven.whole != groups-2 {
		t.Errorf("a short group, of %d proven\nwant it to wait\ngot  %v", m.Proven.whole, err)
	}
}
