package filesystem

import (
	"encoding/binary"
	"testing"
)

func TestGoalLeavesOutAShortLastGroup(t *testing.T) {
	var g xfsGeom
	binary.NativeEndian.PutUint32(g[8:], 1000) // blocks per group
	for blocks, want := range map[uint64]uint64{
		5000: 5000, 5001: 5000, 5063: 5000, 5064: 5064, 5999: 5999,
	} {
		if got := g.usable(blocks); got != want {
			t.Errorf("of %d blocks\nwant %d\ngot  %d", blocks, want, got)
		}
	}
}

// FuzzXFSGeometry checks that a grown filesystem ends at most a short group before the requested
// end, never beyond it, and where the kernel ends it, too.
func FuzzXFSGeometry(f *testing.F) {
	seed := func(blockSize, groupBlocks uint32, dataBlocks, goal uint64) {
		var g xfsGeom
		binary.NativeEndian.PutUint32(g[0:], blockSize)
		binary.NativeEndian.PutUint32(g[8:], groupBlocks)
		binary.NativeEndian.PutUint64(g[32:], dataBlocks)
		f.Add(g[:40], goal)
	}
	seed(4096, 65536, 262144, 327744)
	seed(512, 64, 1, 63)
	seed(65536, 1, 1<<47, 1<<63)
	seed(0, 0, 1<<63, 1)
	f.Fuzz(func(t *testing.T, b []byte, goal uint64) {
		var g xfsGeom
		copy(g[:], b)
		if g.check("/dev/vda") != nil {
			return
		}
		if bytes := g.dataBlocks() * uint64(g.blockSize()); bytes/uint64(g.blockSize()) != g.dataBlocks() {
			t.Errorf("%d blocks of %d bytes were taken", g.dataBlocks(), g.blockSize())
		}
		blocks := g.usable(goal)
		last := blocks % uint64(g.groupBlocks())
		if blocks > goal || goal-blocks >= xfsMinGroupBlocks || last != 0 && last < xfsMinGroupBlocks || g.usable(blocks) != blocks {
			t.Errorf("of %d blocks, %d a group, %d are used", goal, g.groupBlocks(), blocks)
		}
	})
}

// xfsOf returns a geometry of this many blocks, in groups of 1000.
func xfsOf(blocks uint64) *xfsGeom {
	var g xfsGeom
	binary.NativeEndian.PutUint32(g[0:], 4096)
	binary.NativeEndian.PutUint32(g[8:], 1000)
	binary.NativeEndian.PutUint64(g[32:], blocks)
	return &g
}

// A grower that is ahead of a request for the end of a group is ahead by a whole group, and the
// kernel never removes a group. No grower can be ahead of the device's end. A short last group is
// made whole by a separate step.
func TestEveryStepEndsWithAGroupOrWithTheDevice(t *testing.T) {
	for _, c := range []struct{ from, goal, device uint64 }{
		{4000, 5500, 9300}, {4000, 9300, 9300}, {4300, 4400, 9000}, {4300, 100_000, 100_000}, {4000, 4001, 4063}, {4000, 1_000_000, 1_000_500},
	} {
		steps := 0
		for at := c.from; ; steps++ {
			next := xfsOf(at).step(c.goal, c.device)
			if next <= at {
				break
			}
			if next > c.device || next%1000 != 0 && next != c.device || at%1000 != 0 && next > at-at%1000+1000 {
				t.Errorf("%+v: a step from %d to %d", c, at, next)
			}
			at = next
		}
		if steps > 30 {
			t.Errorf("%+v took %d steps", c, steps)
		}
	}
}

func TestGoalIsWhereTheStepsEnd(t *testing.T) {
	for _, c := range []struct{ blocks, device, want uint64 }{
		{5500, 9300, 6000}, {9100, 9300, 9300}, {5000, 9300, 5000}, {9300, 9300, 9300}, {9400, 9300, 9400},
	} {
		if got := xfsGoal(Geometry{GroupBlocks: 1000}, c.blocks, c.device); got != c.want {
			t.Errorf("%d of %d\nwant %d\ngot  %d", c.blocks, c.device, c.want, got)
		}
	}
}
