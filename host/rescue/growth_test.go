package rescue

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	mib        = 1 << 20
	groupMiB   = 76 // of each of the four groups in made's 304 MiB
	testBlock  = 4096
	wholeGroup = groupMiB * mib / testBlock
	// grownMiB is the size of grownImage after the growth: six whole groups and a part of another.
	grownMiB    = 500
	grownBlocks = grownMiB * mib / testBlock
	grownGroups = 7
)

// eofs is a kernel's message about a log that leads beyond the filesystem's end.
const eofs = "XFS (vda): xfs_buf_map_verify: daddr 0x98001 out of range, EOFS 0x98000"

// edit changes bytes of a sector of an image and updates the sector's checksum.
func edit(t *testing.T, path string, at int64, crc int, change func(sector []byte)) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	sector := make([]byte, 512)
	_, err = f.ReadAt(sector, at)
	must(t, err)
	change(sector)
	binary.LittleEndian.PutUint32(sector[crc:], checksum(sector, crc))
	_, err = f.WriteAt(sector, at)
	must(t, err)
}

// editGroup edits the superblock of a group.
func editGroup(t *testing.T, path string, group int, change func(sector []byte)) {
	t.Helper()
	edit(t, path, int64(group)*groupMiB*mib, xfsCRC, change)
}

func resized(blocks uint64, groups uint32) func([]byte) {
	return func(sector []byte) {
		binary.BigEndian.PutUint64(sector[xfsBlocks:], blocks)
		binary.BigEndian.PutUint32(sector[xfsGroups:], groups)
	}
}

// grownImage makes an xfs whose growth has reached all superblocks but the primary one: those of
// the new groups and of the other old groups have the new size.
func grownImage(t *testing.T) string {
	t.Helper()
	path := made(t, "mkfs.xfs", "-q", "-b", "size=4096", "-d", "agcount=4", "-s", "size=512")
	must(t, os.Truncate(path, grownMiB*mib))
	primary := make([]byte, 512)
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	_, err = f.ReadAt(primary, 0)
	must(t, err)
	for g := 1; g < grownGroups; g++ {
		editGroup(t, path, g, func(sector []byte) {
			copy(sector, primary)
			resized(grownBlocks, grownGroups)(sector)
		})
	}
	return path
}

// shorten writes the header of a group so that the group is the last one and not whole.
func shorten(t *testing.T, path string, group int) {
	t.Helper()
	edit(t, path, int64(group)*groupMiB*mib+512, agfCRC, func(sector []byte) {
		copy(sector, agfMagic)
		binary.BigEndian.PutUint32(sector[agfNumber:], uint32(group))
		binary.BigEndian.PutUint32(sector[agfLength:], wholeGroup/2)
	})
}

// hash returns the hash of every block of an image that has a byte other than zero. It ignores
// blocks of zeros, because writeback adds them to and removes them from the data that SEEK_DATA
// finds.
func hash(t *testing.T, path string) (sum [sha256.Size]byte) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	h, end := sha256.New(), int64(0)
	for {
		at, err := unix.Seek(int(f.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			h.Sum(sum[:0])
			return sum
		}
		must(t, err)
		end, err = unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
		must(t, err)
		for block := make([]byte, testBlock); at < end; at += testBlock {
			n, err := f.ReadAt(block, at)
			if err != nil && err != io.EOF {
				t.Fatal(err)
			}
			if bytes.Trim(block[:n], "\x00") != nil {
				binary.Write(h, binary.BigEndian, at)
				h.Write(block[:n])
			}
		}
	}
}

// primaryBytes returns the filesystem size in the primary superblock, with which a mount would
// begin.
func primaryBytes(t *testing.T, path string) uint64 {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	s, err := readPrimary(f)
	must(t, err)
	return s.bytes()
}

// errRefused is the error of a VM whose kernel refuses to mount.
var errRefused = mountError{errors.New("structure needs cleaning"), true}

// asked returns a rescue in which attempt replaces the VM. begins receives the size with which each
// attempt began.
func asked(t *testing.T, path string, attempt func(number int) error) (r *rescue, begins *[]uint64) {
	t.Helper()
	r, begins = afterVM(t, "xfs", path), new([]uint64)
	r.attempt = func(context.Context) error {
		*begins = append(*begins, primaryBytes(t, path))
		r.said = []string{eofs}
		return attempt(len(*begins))
	}
	return r, begins
}

func TestNothingIsWrittenWithoutProofOfAGrowth(t *testing.T) {
	old := func(change func([]byte)) func(*testing.T, string) { // changes the superblocks of all old groups
		return func(t *testing.T, path string) {
			for g := 1; g < 4; g++ {
				editGroup(t, path, g, change)
			}
		}
	}
	set := func(at int, bytes ...byte) func([]byte) { return func(s []byte) { copy(s[at:], bytes) } }
	another := func(s []byte) { s[32] ^= 1 } // a UUID other than the one mkfs has drawn
	for want, change := range map[string]func(t *testing.T, path string){
		"none of its 4 groups has a superblock with more": old(resized(304*mib/testBlock, 4)), // but those of the new groups have
		"has another UUID":                            old(another),
		"has another block size":                      old(func(s []byte) { set(xfsBlockSize, 0, 0, 8, 0)(s); resized(2*grownBlocks, 2*grownGroups)(s) }),
		"has another group size":                      old(func(s []byte) { set(xfsGroupBlocks, 0, 0, 0x4b)(s); resized(6*0x4b00, 6)(s) }),
		"has another log's place":                     old(set(xfsLogStart+7, 99)),
		"has another log's length":                    old(set(99, 99)),
		"has another features":                        old(set(219, 0xff)),
		"has another version than":                    old(set(xfsVersion, 0x94)),
		"has version 4":                               old(set(xfsVersion+1, 0xa4)),
		"has sectors of 4096 bytes":                   old(set(xfsSectorSize, 0x10)),
		"has sectors of 0 bytes":                      old(set(xfsSectorSize, 0)),
		"mkfs has not finished":                       func(t *testing.T, path string) { editGroup(t, path, 0, set(xfsInProgress, 1)) },
		"superblock of group 1 is not a superblock":   old(set(0, 'Y')),
		"has 128000 blocks in 9 groups":               old(resized(grownBlocks, 9)),
		"has 128000 blocks in 6 groups":               old(resized(grownBlocks, 6)),
		"but the disk has only":                       func(t *testing.T, path string) { must(t, os.Truncate(path, grownMiB*mib-1)) },
		"last group is invalid: the superblock of gr": func(t *testing.T, path string) { editGroup(t, path, 6, another) },
		"primary superblock has a wrong checksum":     func(t *testing.T, path string) { flip(t, path, 120) },
		"primary superblock has version 4":            func(t *testing.T, path string) { editGroup(t, path, 0, set(xfsVersion+1, 0xa4)) },
		"but the disk only":                           func(t *testing.T, path string) { must(t, os.Truncate(path, 304*mib-1)) },
		"superblock of group 1 has a wrong check": func(t *testing.T, path string) {
			for g := int64(1); g < 4; g++ {
				flip(t, path, g*groupMiB*mib+120)
			}
		},
		"it has only one group": func(t *testing.T, path string) { editGroup(t, path, 0, resized(wholeGroup, 1)) },
	} {
		path := grownImage(t)
		change(t, path)
		before := hash(t, path)
		r := afterVM(t, "xfs", path)
		r.attempt = func(context.Context) error { r.said = []string{eofs}; return errRefused }
		err := r.mount(t.Context())
		if !isRefusal(err) || !strings.Contains(err.Error(), want) && !strings.Contains(r.tried, want) || r.report.Superblock != nil {
			t.Errorf("\nwant it refused: %q\ngot  %v, %+v", want, err, r.report.Superblock)
		}
		if hash(t, path) != before {
			t.Errorf("%s: the disk was changed", want)
		}
	}
}

// flip changes a byte without updating the checksum.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	b := make([]byte, 1)
	_, err = f.ReadAt(b, at)
	must(t, err)
	_, err = f.WriteAt([]byte{^b[0]}, at)
	must(t, err)
}

func TestNothingIsWrittenForAnotherReasonToRefuse(t *testing.T) {
	path := grownImage(t)
	before := hash(t, path)
	for want, attempt := range map[string]func(r *rescue) error{
		"reports neither a log that reaches beyond": func(r *rescue) error { r.said = []string{"XFS (vda): Metadata CRC error"}; return errRefused },
		"no VM": func(r *rescue) error { r.said = []string{eofs}; return errors.New("no VM") },
	} {
		r := afterVM(t, "xfs", path)
		r.attempt = func(context.Context) error { return attempt(r) }
		if err := r.mount(t.Context()); err == nil || !strings.Contains(err.Error(), want) || r.report.Superblock != nil || hash(t, path) != before {
			t.Errorf("\nwant %q, and nothing written\ngot  %v, %+v", want, err, r.report.Superblock)
		}
		must(t, r.disk.Close())
	}
}

func TestProvenGrowthIsWrittenAndNothingBesides(t *testing.T) {
	path := grownImage(t)
	whole, err := os.ReadFile(path)
	must(t, err)
	r, begins := asked(t, path, func(n int) error { return []error{errRefused, nil}[n-1] })
	must(t, r.mount(t.Context()))
	if len(*begins) != 2 || (*begins)[0] != 304*mib || (*begins)[1] != grownMiB*mib {
		t.Errorf("attempts\nwant one that begins with 304 MiB and one with 500\ngot  %d", *begins)
	}
	want := Correction{FromBytes: 304 * mib, ToBytes: grownMiB * mib, WroteBytes: grownMiB * mib, Group: 1}
	if r.report.Superblock == nil || *r.report.Superblock != want {
		t.Errorf("report\nwant %+v\ngot  %+v", want, r.report.Superblock)
	}
	after, err := os.ReadFile(path)
	must(t, err)
	for _, field := range [][2]int{{xfsBlocks, 8}, {xfsGroups, 4}, {xfsCRC, 4}} {
		copy(whole[field[0]:field[0]+field[1]], after[field[0]:])
	}
	if !bytes.Equal(whole, after) {
		t.Error("more was written than sb_dblocks, sb_agcount and sb_crc")
	}
	out, err := exec.Command("/usr/sbin/xfs_db", "-r", "-f", "-c", "sb 0", "-c", "print dblocks agcount crc", path).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "(correct)") || !strings.Contains(string(out), "agcount = 7") {
		t.Errorf("xfs_db\nwant 7 groups and a correct checksum\ngot  %s, error %v", out, err)
	}
}

func TestChecksumIsOfTheWholeSector(t *testing.T) {
	path := made(t, "mkfs.xfs", "-q", "-s", "size=4096")
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	s, err := readPrimary(f)
	if err != nil || len(s.sector) != 4096 || s.bytes() != 304*mib {
		t.Fatalf("\nwant a sector of 4096 bytes\ngot  %d, %d bytes, error %v", len(s.sector), s.bytes(), err)
	}
	for g := uint64(1); g < s.groups; g++ {
		if other, err := s.ofGroup(f, g); err != nil || other.blocks != s.blocks {
			t.Errorf("group %d\nwant its superblock\ngot  %d blocks, error %v", g, other.blocks, err)
		}
	}
}

func TestOneOldGroupIsProofEnough(t *testing.T) {
	path := grownImage(t)
	editGroup(t, path, 1, resized(304*mib/testBlock, 4))
	flip(t, path, 2*groupMiB*mib+120)
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	if g, err := provenGrowth(t.Context(), f, grownMiB*mib); err != nil || g.group != 3 || g.proven.bytes() != grownMiB*mib {
		t.Errorf("\nwant the proof of group 3\ngot  group %d, %d bytes, error %v", g.group, g.proven.bytes(), err)
	}
}

// Use of the filesystem sets the attribute bit and the quota bit; like the growth, they may be only
// in the log yet.
func TestFeatureBitsSetInUseAreTheSameFilesystem(t *testing.T) {
	path := grownImage(t)
	editGroup(t, path, 1, func(s []byte) { s[xfsVersion+1] |= xfsVersionMoving })
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	if g, err := provenGrowth(t.Context(), f, grownMiB*mib); err != nil || g.group != 1 {
		t.Errorf("\nwant the proof of group 1\ngot  group %d, error %v", g.group, err)
	}
}

func FuzzProvenGrowth(f *testing.F) {
	sector := func(groups uint32, blocks uint64) []byte {
		s := make([]byte, 512)
		copy(s, xfsMagic)
		binary.BigEndian.PutUint32(s[xfsBlockSize:], testBlock)
		binary.BigEndian.PutUint32(s[xfsGroupBlocks:], wholeGroup)
		binary.BigEndian.PutUint16(s[xfsVersion:], 0xb4a5)
		binary.BigEndian.PutUint16(s[xfsSectorSize:], 512)
		resized(blocks, groups)(s)
		return s
	}
	agf := make([]byte, 512)
	copy(agf, agfMagic)
	binary.BigEndian.PutUint32(agf[agfNumber:], 5)
	f.Add(sector(4, 4*wholeGroup), sector(grownGroups, grownBlocks), agf, true, uint64(grownMiB*mib))
	f.Add(sector(4, 4*wholeGroup), sector(1<<32-1, 1<<50), agf, true, uint64(1<<63))
	f.Add(sector(1<<31, 1<<50), sector(grownGroups, grownBlocks), agf, true, uint64(1<<62))
	f.Add(sector(4, 4*wholeGroup), sector(4, 4*wholeGroup), agf, false, uint64(0))
	f.Add([]byte{}, []byte("XFSB"), []byte{}, false, uint64(1))
	f.Fuzz(func(t *testing.T, primary, second, agf []byte, seal bool, size uint64) {
		for _, s := range [][]byte{primary, second} {
			if seal && len(s) == 512 {
				binary.LittleEndian.PutUint32(s[xfsCRC:], checksum(s, xfsCRC))
			}
		}
		if seal && len(agf) == 512 {
			binary.LittleEndian.PutUint32(agf[agfCRC:], checksum(agf, agfCRC))
		}
		g, err := provenGrowth(t.Context(), fuzzed{primary, second, agf}, size)
		if err != nil {
			if printable(err.Error()) != err.Error() {
				t.Errorf("unprintable bytes: %q", err)
			}
			return
		}
		if g.proven.bytes() <= g.primary.bytes() || g.proven.bytes() > size || g.group == 0 || g.group >= g.primary.groups {
			t.Errorf("proven: %d bytes by group %d, of %d groups with %d bytes on a disk of %d", g.proven.bytes(), g.group, g.primary.groups, g.primary.bytes(), size)
		}
		last := g.primary.blocks
		for i, start := range g.starts {
			s, err := parseSuperblock(g.sector(start))
			if err != nil || s.same(g.primary) != nil || s.blocks < last || s.blocks > g.proven.blocks || i >= maxStarts {
				t.Errorf("start %d, %+v: %v", i, start, err)
			}
			last = start.blocks
		}
		if last != g.proven.blocks {
			t.Errorf("the last start\nwant %d blocks\ngot  %d", g.proven.blocks, last)
		}
	})
}

// fuzzed is a disk that has the same superblock and the same header in every group except the
// first.
type fuzzed struct{ primary, second, agf []byte }

func (d fuzzed) ReadAt(p []byte, at int64) (int, error) {
	from := d.agf
	switch {
	case at < 0:
		return 0, errors.New("before the beginning")
	case at == 0:
		from = d.primary
	case at%mib == 0:
		from = d.second
	}
	if n := copy(p, from); n < len(p) {
		return n, io.EOF
	}
	return len(p), nil
}
