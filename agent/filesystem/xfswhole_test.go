package filesystem

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestHeadersOfRealMkfsHaveTheirGroupsLength(t *testing.T) {
	for size, last := range map[int64]uint32{304 << 20: 76 << 20 / 4096, 340 << 20: 0} {
		image := open(t, makeXFS(t, size, "-d", "agsize=76m"))
		group := uint64(size-1) / (76 << 20)
		headers := make([]byte, 3*512)
		if _, err := image.ReadAt(headers, int64(group)*76<<20); err != nil {
			t.Fatal(err)
		}
		if last == 0 {
			last = uint32(size%(76<<20)) / 4096
		}
		for i, magic := range xfsHeaders[1:] {
			if got, err := xfsHeaderLength(headers[(i+1)*512:], magic, group); got != last || err != nil {
				t.Errorf("%s of group %d\nwant %d blocks\ngot  %d, error %v", magic, group, last, got, err)
			}
			if _, err := xfsHeaderLength(headers[(i+1)*512:], magic, group+1); !errors.Is(err, unix.EUCLEAN) {
				t.Errorf("%s of group %d was taken for another one's", magic, group)
			}
		}
	}
}

func TestNothingPastTheDisksEndIsRead(t *testing.T) {
	image := open(t, makeXFS(t, 304<<20))
	d, err := openXFSDisk(Mounted{Disk: image})
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if err := d.readSuper(); err != nil || d.Proven.blocks != 304<<20/4096 {
		t.Errorf("its superblock\nwant %d blocks\ngot  %d, error %v", 304<<20/4096, d.Proven.blocks, err)
	}
	_, err = d.read(512, 304<<20)
	if err == nil || errors.Is(err, unix.EINVAL) {
		t.Errorf("want an error\ngot  %v", err)
	}
}

func FuzzXFSHeader(f *testing.F) {
	header := binary.BigEndian.AppendUint32([]byte("XAGF\x00\x00\x00\x01"), 3)
	f.Add(binary.BigEndian.AppendUint32(header, 19456), uint64(3))
	f.Fuzz(func(t *testing.T, header []byte, group uint64) {
		if blocks, err := xfsHeaderLength(header, "XAGF", group); err == nil && (string(header[:4]) != "XAGF" || blocks != binary.BigEndian.Uint32(header[12:16])) {
			t.Errorf("%x: %d blocks", header, blocks)
		}
	})
}

// More groups than are read at once: the search ends at the first one whose header is short, and
// goes on from there.
func TestGroupsAreProvenUpToTheFirstShortOne(t *testing.T) {
	const group, groups, short, length = 76 << 20, 40, 30, 12
	path := makeXFS(t, groups*group, "-d", "agsize=76m")
	image, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	d, err := openXFSDisk(Mounted{Disk: image, Proven: &Proven{}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	var g xfsGeom
	for at, value := range map[int]uint32{0: 4096, 8: group / 4096, 20: 512} {
		binary.NativeEndian.PutUint32(g[at:], value)
	}
	for _, step := range []struct {
		blocks uint32
		want   uint64
	}{{1, short}, {group / 4096, groups}} {
		if _, err := image.WriteAt(binary.BigEndian.AppendUint32(nil, step.blocks), short*group+512+length); err != nil {
			t.Fatal(err)
		}
		if err := d.findWhole(t.Context(), &g, groups); err != nil || d.Proven.whole != step.want {
			t.Errorf("group %d has %d blocks\nwant %d groups found whole\ngot  %d, error %v", short, step.blocks, step.want, d.Proven.whole, err)
		}
	}
}
