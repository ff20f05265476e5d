package logwrites

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
)

const sector = 512

// maker writes a record.
type maker struct{ bytes []byte }

func begin() *maker {
	super := make([]byte, sector)
	binary.LittleEndian.PutUint64(super[0:], magic)
	binary.LittleEndian.PutUint64(super[8:], version)
	binary.LittleEndian.PutUint32(super[24:], sector)
	return &maker{super}
}

// add adds an entry that fills count sectors with a letter. It returns the new length of the
// record.
func (m *maker) add(flags, first, count uint64, letter byte) int64 {
	entry := make([]byte, sector)
	for i, word := range []uint64{first, count, flags, 0} {
		binary.LittleEndian.PutUint64(entry[8*i:], word)
	}
	m.bytes = append(m.bytes, entry...)
	if flags&(Discard|Mark) == 0 {
		m.bytes = append(m.bytes, bytes.Repeat([]byte{letter}, int(count)*sector)...)
	}
	return int64(len(m.bytes))
}

func (m *maker) entries(t *testing.T) []Entry {
	t.Helper()
	entries, err := Read(bytes.NewReader(m.bytes), int64(len(m.bytes)))
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// memory is an image in memory.
type memory []byte

func (m memory) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }

// letters returns the letter of each sector of an image, '.' for an empty one.
func (m memory) letters() string {
	var b strings.Builder
	for at := 0; at < len(m); at += sector {
		if letter := m[at]; letter != 0 {
			b.WriteByte(letter)
		} else {
			b.WriteByte('.')
		}
	}
	return b.String()
}

func (m *maker) replay(t *testing.T, sectors int, p Point) string {
	t.Helper()
	image := make(memory, sectors*sector)
	if err := Replay(image, int64(len(image)), bytes.NewReader(m.bytes), m.entries(t), p); err != nil {
		t.Fatal(err)
	}
	return image.letters()
}

func TestPointHasTheFlushedWritesAndNoLaterOnes(t *testing.T) {
	m := begin()
	m.add(0, 0, 2, 'a')
	m.add(Mark, 0, 0, 0)
	unflushed := m.add(0, 2, 1, 'b')
	flushed := m.add(Flush, 0, 0, 0)
	m.add(0, 1, 1, 'c')
	fua := m.add(FUA, 3, 1, 'd')
	m.add(Discard, 0, 4, 0)
	end := m.add(0, 4, 1, 'e')
	for _, c := range []struct {
		at    int64
		after After
		want  string
	}{
		{sector, All, "....."},
		{unflushed, None, "....."},
		{unflushed, All, "aab.."},
		{unflushed - 1, All, "aa..."},
		{flushed, None, "aab.."},
		{fua, None, "aabd."},
		{fua, All, "acbd."},
		{end, None, "aabd."},
		{end, All, "acbde"},
	} {
		if got := m.replay(t, 5, Point{At: c.at, After: c.after}); got != c.want {
			t.Errorf("cut at %d, %v after the flush\nwant %s\ngot  %s", c.at, c.after, c.want, got)
		}
	}
}

func TestSomeIsSeededAndTearsAtPiecesOf4096Bytes(t *testing.T) {
	m := begin()
	const pieces, each = 8, piece / sector
	end := m.add(0, each/2, pieces*each, 'x') // begins inside a piece
	seen := map[string]bool{}
	for seed := range uint64(64) {
		p := Point{At: end, After: Some, Seed: seed}
		got := m.replay(t, (pieces+1)*each, p)
		if again := m.replay(t, (pieces+1)*each, p); again != got {
			t.Fatalf("seed %d\nwant %s\ngot  %s", seed, got, again)
		}
		seen[got] = true
		got = strings.Replace(got, strings.Repeat(".", each/2), strings.Repeat(got[each/2:each/2+1], each/2), 1)
		for i := each; i < pieces*each; i += each {
			if part := got[i : i+each]; part != strings.Repeat(part[:1], each) {
				t.Errorf("seed %d: a piece is torn: %s", seed, part)
			}
		}
	}
	if len(seen) < 10 {
		t.Errorf("64 seeds made %d images", len(seen))
	}
}

func TestRecordEndsWhereAnEntryIsNotThereInFull(t *testing.T) {
	m := begin()
	whole := m.add(0, 0, 1, 'a')
	m.add(0, 1, 2, 'b')
	for _, text := range [][]byte{
		m.bytes[:len(m.bytes)-1],
		m.bytes[:whole+sector-1],
		append(m.bytes[:whole:whole], make([]byte, 3*sector)...),
	} {
		entries, err := Read(bytes.NewReader(text), int64(len(text)))
		if err != nil || len(entries) != 1 || entries[0].End != whole {
			t.Errorf("want the first entry alone\ngot  %+v, %v", entries, err)
		}
	}
}

func TestInvalidRecordIsRefused(t *testing.T) {
	change := func(at int, value byte) []byte {
		m := begin()
		m.add(0, 0, 1, 'a')
		m.bytes[at] = value
		return m.bytes
	}
	for name, c := range map[string]struct {
		text []byte
		want string
	}{
		"nothing":      {nil, "no superblock"},
		"magic":        {change(0, 1), "magic"},
		"version":      {change(8, 2), "version 2"},
		"no sectors":   {change(25, 0), "sectors of 0 bytes"},
		"odd sectors":  {change(24, 1), "sectors of 513"},
		"flags":        {change(sector+17, 1), "unknown flags 0x100"},
		"huge write":   {change(sector+15, 1), "a write of"},
		"distant disk": {change(sector+7, 0xff), "beyond every disk"},
	} {
		if _, err := Read(bytes.NewReader(c.text), int64(len(c.text))); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s\nwant %s\ngot  %v", name, c.want, err)
		}
	}
	m := begin()
	end := m.add(0, 4, 1, 'a')
	if err := Replay(make(memory, 4*sector), 4*sector, bytes.NewReader(m.bytes), m.entries(t), Point{At: end}); err == nil {
		t.Error("a write beyond the image's end is taken")
	}
}

func FuzzRead(f *testing.F) {
	m := begin()
	m.add(0, 0, 2, 'a')
	m.add(Flush, 0, 0, 0)
	m.add(FUA, 1, 1, 'b')
	m.add(Discard, 0, 9, 0)
	m.add(Mark, 0, 0, 0)
	f.Add(m.bytes, uint64(1))
	f.Add(m.bytes[:3*sector+7], uint64(2))
	f.Add([]byte(nil), uint64(3))
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		entries, err := Read(bytes.NewReader(text), int64(len(text)))
		if err != nil && entries != nil {
			t.Errorf("an error and %d entries", len(entries))
		}
		last := int64(0)
		for _, e := range entries {
			if e.Data <= last || e.End < e.Data+e.Bytes || e.End > int64(len(text)) || e.Bytes < 0 || e.Offset < 0 {
				t.Fatalf("entry %+v behind %d, of %d bytes", e, last, len(text))
			}
			last = e.End
		}
		image := make(memory, 16*sector)
		for after := None; after <= All; after++ {
			// Replay returns an error if the image is too small.
			_ = Replay(image, int64(len(image)), bytes.NewReader(text), entries, Point{At: last, After: after, Seed: seed})
		}
	})
}
