package cuts

import (
	"bytes"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/directvol/directvol/tests/cuts/logwrites"
	"github.com/directvol/directvol/tests/vm"
)

func TestSuperblockOfEveryFormatSaysItsSize(t *testing.T) {
	for _, f := range slices.Concat(slices.Collect(maps.Values(formats))...) {
		for _, options := range f.options {
			image, err := vm.Scratch(t.Context(), t.TempDir(), f.fstype, int64(f.bytes), options...)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := vm.SizeOnDisk(f.fstype, image); err != nil || got != f.bytes {
				t.Errorf("%s %v\nwant %d\ngot  %d, error %v", f.fstype, options, f.bytes, got, err)
			}
			other := "xfs"
			if f.fstype == other {
				other = "ext4"
			}
			if _, err := vm.SizeOnDisk(other, image); err == nil || !strings.Contains(err.Error(), image) {
				t.Errorf("%s read as %s\nwant an error that names the image\ngot  %v", f.fstype, other, err)
			}
		}
	}
}

func TestWindowLastsUntilTheSuperblockHasTheLastSize(t *testing.T) {
	v := &volume{size: 300, growths: []growth{{100, 200, 1000}, {200, 300, 2000}}}
	for _, c := range []struct {
		at      int64
		super   uint64
		growths int
		window  bool
	}{
		{1000, 100, 0, false}, {1001, 100, 1, true}, {1001, 200, 1, false},
		{2001, 100, 2, true}, {2001, 200, 2, true}, {2001, 300, 2, false},
	} {
		if growths, window := v.windowAt(c.at, c.super); growths != c.growths || window != c.window {
			t.Errorf("at %d, with %d in the superblock\nwant %d growths, in the window %v\ngot  %d, %v", c.at, c.super, c.growths, c.window, growths, window)
		}
	}
	r := &replays{volume: v}
	for at, want := range map[int64]uint64{0: 100, 999: 100, 1000: 200, 1999: 200, 2000: 300, 9000: 300} {
		if got := r.sizeAt(at); got != want {
			t.Errorf("disk at %d\nwant %d\ngot  %d", at, want, got)
		}
	}
}

func TestShiftedImageHasItsContentBehindAHole(t *testing.T) {
	path, err := vm.Scratch(t.Context(), t.TempDir(), "ext4", 64*miB)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, kept := range []int{keptBytes, 0} {
		by := int64(keptBytes)
		if kept == 0 {
			by = -by
		}
		if err := shift(path, by); err != nil {
			t.Fatal(err)
		}
		after, err := os.ReadFile(path)
		if err != nil || len(after) != len(before)+kept || !bytes.Equal(after[kept:], before) || bytes.Count(after[:kept], []byte{0}) != kept {
			t.Errorf("shifted to %d: %d bytes, or others, error %v", kept, len(after), err)
		}
	}
}

func TestDirectedPointsLieInAWindow(t *testing.T) {
	r := &replays{windows: [][2]int{{2, 3}, {7, 7}}}
	for end := range int64(10) {
		r.entries = append(r.entries, logwrites.Entry{End: end})
	}
	random := rand.New(rand.NewPCG(1, 0))
	seen := map[int64]bool{}
	for range 1000 {
		seen[r.choose(random, true).At] = true
	}
	if len(seen) != 3 || !seen[2] || !seen[3] || !seen[7] {
		t.Errorf("directed\nwant 2, 3 and 7\ngot  %v", seen)
	}
	clear(seen)
	for range 1000 {
		seen[r.choose(random, false).At] = true
	}
	if len(seen) != len(r.entries) {
		t.Errorf("anywhere\nwant every entry\ngot  %v", seen)
	}
}

func TestTableCountsEveryLoss(t *testing.T) {
	c := counts{}
	n := c.of(row{"xfs", "6.1", kill})
	*n = count{cuts: 3, volumes: 6, growths: 40, blocks: 900, windows: 5, rescued: 1, lost: map[loss]int{metWindow: 2, unclean: 7}}
	c.of(row{"ext4", "6.1", replay}).volumes = 4
	want := "| ext4 | 6.1 | replay | 0 | 4 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |\n" +
		"| xfs | 6.1 | kill | 3 | 6 | 40 | 900 | 5 | 2 | 1 | 0 | 0 | 0 | 7 | 0 | 0 |\n" +
		"| all |  |  |  | 10 | 40 | 900 | 5 | 2 | 1 | 0 | 0 | 0 | 7 | 0 | 0 |\n"
	if got := c.table(); !strings.HasSuffix(got, want) {
		t.Errorf("\nwant %s\ngot  %s", want, got)
	}
}
