package filesystem

import "testing"

// A range that ended inside a group of an xfs would have Linux 6.1 discard the group's free extents
// once for each range.
func TestRangesOfAnXFSHaveWholeGroups(t *testing.T) {
	for _, test := range []struct{ group, want uint64 }{
		{0, 1 << 30}, // ext4
		{76 << 20, 13 * 76 << 20},
		{1 << 30, 1 << 30},
		{1<<40 - 4096, 1<<40 - 4096},
	} {
		if got := trimBytes(Geometry{BlockSize: 4096, GroupBlocks: test.group / 4096}); got != test.want {
			t.Errorf("groups of %d bytes\nwant ranges of %d\ngot  %d", test.group, test.want, got)
		}
	}
}
