package filesystem

import (
	"encoding/binary"
	"testing"
)

func TestShortLastGroupIsNotAskedFor(t *testing.T) {
	var g xfsGeom
	binary.NativeEndian.PutUint32(g[8:], 1000) // blocks a group
	for blocks, want := range map[uint64]uint64{
		5000: 5000, 5001: 5000, 5063: 5000, 5064: 5064, 5999: 5999,
	} {
		if got := g.usable(blocks); got != want {
			t.Errorf("of %d blocks\nwant %d\ngot  %d", blocks, want, got)
		}
	}
}
