package filesystem

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"testing"
)

// touched is a disk that notes which blocks are read.
type touched struct {
	block uint64
	seen  map[uint64]bool
	bytes uint64
	fails uint64 // the block whose read fails
}

var errUnreadable = errors.New("unreadable")

func (d *touched) ReadAt(p []byte, at int64) (int, error) {
	for block := uint64(at) / d.block; block*d.block < uint64(at)+uint64(len(p)); block++ {
		if d.seen[block] = true; block == d.fails {
			return 0, errUnreadable
		}
	}
	d.bytes += uint64(len(p))
	return len(p), nil
}

var bitmapAt = regexp.MustCompile(`(?m)^Group (\d+):|(?:Block|Inode) bitmap at (\d+)`)

// The layout of the new groups is that of mkfs, if the old size ends with a flex group, as it is
// the kernel's. All bitmaps of the new groups are read, and not much more.
func TestGrowthReadsTheBitmapsOfItsNewGroups(t *testing.T) {
	for name, c := range map[string]struct {
		options []string
		from    uint64 // the first new group
		bytes   int64
	}{
		"1 KiB blocks":          {[]string{"-b", "1024"}, 16, 512 << 20},
		"4 KiB blocks":          {[]string{"-b", "4096"}, 16, 5 << 30},
		"large flex groups":     {[]string{"-b", "1024", "-G", "32"}, 32, 512 << 20},
		"without flex groups":   {[]string{"-b", "1024", "-O", "^flex_bg"}, 5, 512 << 20},
		"without sparse copies": {[]string{"-b", "1024", "-O", "^flex_bg,^sparse_super,^resize_inode"}, 5, 512 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			image := makeExt4(t, c.bytes, c.options...)
			s, err := readExt4Super(open(t, image))
			if err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command("dumpe2fs", image).Output()
			if err != nil {
				t.Fatal(err)
			}
			disk := &touched{block: s.blockSize, seen: map[uint64]bool{}}
			if err := s.readAhead(disk, s.firstBlock+c.from*s.blocksPerGroup, s.blocks); err != nil {
				t.Fatal(err)
			}
			var group, count, first uint64
			for _, found := range bitmapAt.FindAllSubmatch(out, -1) {
				if found[1] != nil {
					group = number(t, found[1])
				} else if block := number(t, found[2]); group >= c.from {
					if first == 0 {
						first = block
					}
					if count++; !disk.seen[block] {
						t.Errorf("a bitmap of group %d, block %d, is not read", group, block)
					}
				}
			}
			if groups := ceil(s.blocks-s.firstBlock, s.blocksPerGroup) - c.from; count != 2*groups {
				t.Errorf("bitmaps in dumpe2fs's output\nwant %d\ngot  %d", 2*groups, count)
			}
			t.Logf("%d bitmaps, %d bytes read", count, disk.bytes)
			disk.fails = first
			if err := s.readAhead(disk, s.firstBlock+c.from*s.blocksPerGroup, s.blocks); !errors.Is(err, errUnreadable) {
				t.Errorf("with an unreadable bitmap\nwant an error\ngot  %v", err)
			}
		})
	}
}

func number(t *testing.T, text []byte) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(string(bytes.TrimSpace(text)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A filesystem whose bitmaps have no checksums is not read: neither does the kernel.
func TestGrowthWithoutChecksumsReadsNothing(t *testing.T) {
	image := makeExt4(t, 64<<20, "-O", "^metadata_csum")
	disk, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	s, err := readExt4Super(disk)
	if err != nil {
		t.Fatal(err)
	}
	none := &touched{block: s.blockSize, seen: map[uint64]bool{}}
	if err := s.readAhead(none, s.blocks, 4*s.blocks); err != nil || none.bytes > 0 {
		t.Errorf("want nothing read\ngot  %d bytes, error %v", none.bytes, err)
	}
}
