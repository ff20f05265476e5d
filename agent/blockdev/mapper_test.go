package blockdev

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/errkind"
)

// answerOf returns the kernel's answer to DM_TABLE_STATUS for a table (retrieve_status in
// drivers/md/dm-ioctl.c): the offset of the next target counts from the first one.
func answerOf(t table) []byte {
	b := loadMessage(0xfd00, t, t.targets[len(t.targets)-1].length)
	copy(b[dmName:], t.name)
	copy(b[dmUUID:], t.uuid)
	binary.LittleEndian.PutUint32(b[28:], t.flags|dmStatusTable)
	for i, at := 0, dmHeaderBytes; i < len(t.targets); i++ {
		at += specBytes(t.targets[i])
		binary.LittleEndian.PutUint32(b[at-specBytes(t.targets[i])+20:], uint32(at-dmHeaderBytes))
	}
	return b
}

const secret = "5ca1ab1e00112233445566778899aabbccddeeff00112233445566778899aabb"

func one(kind, params string) table {
	return table{name: "data", targets: []target{{length: 2048, kind: kind, params: []byte(params)}}}
}

func TestTableIsReadAsItWasLoaded(t *testing.T) {
	want := table{name: "data", uuid: "CRYPT-PLAIN-data", flags: dmStatusTable, targets: []target{
		{0, 100, "linear", []byte("254:16 7")}, {100, 24, "striped", []byte("1 8 254:0 0")}, {124, 1 << 40, "crypt", []byte("aes-xts-plain64 " + secret + " 0 254:0 32768")},
	}}
	got, err := parseTable(answerOf(want))
	if err != nil || got.name != want.name || got.uuid != want.uuid || got.sectors() != 124+1<<40 || len(got.targets) != 3 {
		t.Fatalf("want %+v\ngot  %+v, %v", want, got, err)
	}
	for i, is := range got.targets {
		if w := want.targets[i]; is.start != w.start || is.length != w.length || is.kind != w.kind || !bytes.Equal(is.params, w.params) {
			t.Errorf("target %d\nwant %+v\ngot  %+v", i, w, is)
		}
	}
}

func TestLayerKeepsWhatLiesBeforeItsLastTarget(t *testing.T) {
	const sector = 512
	for _, c := range []struct {
		name  string
		table table
		disk  uint64
		want  uint64
	}{
		{"a whole disk", one("linear", "254:0 0"), 1 << 20, 1 << 20},
		{"a linear one with an offset", one("linear", "254:0 2048"), 4 << 20, 3 << 20},
		{"a LUKS header", one("crypt", "aes-xts-plain64 "+secret+" 0 254:0 32768 1 allow_discards"), 64 << 20, 48 << 20},
		{"sectors of 4096 bytes", one("crypt", "aes-xts-plain64 "+secret+" 0 254:0 8 2 sector_size:4096 iv_large_sectors"), 1<<20 + 3*sector, 1<<20 - 4096},
		{"two targets", table{targets: []target{{0, 100, "linear", []byte("254:16 0")}, {100, 50, "linear", []byte("254:0 8")}}}, 1 << 20, 1<<20 + (100-8)*sector},
		{"a disk that ends before the offset", one("linear", "254:0 2048"), 1 << 19, 0},
	} {
		l, err := layerOf(Device{Path: "/dev/dm-0"}, c.table)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := (Stack{layers: []layer{l}}).Usable(c.disk); got != c.want {
			t.Errorf("%s: above a disk of %d bytes\nwant %d\ngot  %d", c.name, c.disk, c.want, got)
		}
	}
}

func TestUsableSizeGoesThroughEveryLayer(t *testing.T) {
	s := Stack{layers: []layer{{offset: 8, grain: 8}, {start: 16, offset: 2048, grain: 1}}}
	if got, want := s.Usable(2<<20), uint64((4096-2048+16-8)*512); got != want {
		t.Errorf("want %d\ngot  %d", want, got)
	}
}

// The formats of cryptsetup that end where the disk does, or grow with it.
func TestEncryptedMappingGrowsIfItsEndIsFree(t *testing.T) {
	for _, uuid := range []string{"", "CRYPT-PLAIN-data", "CRYPT-LUKS1-abc-data", "CRYPT-LUKS2-abc-data"} {
		crypt := one("crypt", "aes-xts-plain64 "+secret+" 0 254:0 32768")
		crypt.uuid = uuid
		if l, err := layerOf(Device{Path: "/dev/dm-0"}, crypt); err != nil || l.fixed != nil {
			t.Errorf("%q: %v, %v", uuid, err, l.fixed)
		}
	}
}

func TestSectorOfADiskIsFoundInTheMappingAboveIt(t *testing.T) {
	s := Stack{layers: []layer{{offset: 8, length: 100}, {start: 16, offset: 2048, length: 200}}}
	for sector, want := range map[uint64]bool{
		0: false, 2047: false, 2048: true, 2048 - 16 + 8 + 99: true, 2048 - 16 + 8 + 100: false, 2048 + 199: false, 2048 + 200: false,
	} {
		if got := s.Has(sector); got != want {
			t.Errorf("sector %d\nwant %v\ngot  %v", sector, want, got)
		}
	}
}

// dm-1 ─ dm-0 ─ vda1, a partition of vda
func TestDevicesBelowAMappingAreFound(t *testing.T) {
	root := t.TempDir()
	numbers := filepath.Join(root, "sys/dev/block")
	err := os.MkdirAll(numbers, 0o755)
	for name, device := range map[string]struct{ number, slave string }{
		"vda": {"254:0", ""}, "vda/vda1": {"254:1", ""}, "dm-0": {"253:0", "vda/vda1"}, "dm-1": {"253:1", "dm-0"},
	} {
		dir := filepath.Join(root, "sys/block", name)
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, "slaves"), 0o755), os.WriteFile(filepath.Join(dir, "dev"), []byte(device.number+"\n"), 0o644),
			os.Symlink("../../block/"+name, filepath.Join(numbers, device.number)))
		if device.slave != "" {
			err = errors.Join(err, os.Symlink("../../"+device.slave, filepath.Join(dir, "slaves", filepath.Base(device.slave))))
		}
	}
	for file, text := range map[string]string{"partition": "1\n", "start": "2048\n", "size": "1000\n"} {
		err = errors.Join(err, os.WriteFile(filepath.Join(root, "sys/block/vda/vda1", file), []byte(text), 0o644))
	}
	if err != nil {
		t.Fatal(err)
	}
	if want, got := []string{"dm-0", "vda1", "vda"}, Below(root, unix.Mkdev(253, 1)); !slices.Equal(got, want) {
		t.Errorf("want %v\ngot  %v", want, got)
	}
	if got := Below(root, unix.Mkdev(254, 0)); len(got) > 0 {
		t.Errorf("below a disk\nwant nothing\ngot  %v", got)
	}
	for name, minor := range map[string]uint32{"vda1": 1, "vda": 0} {
		err := refuseBottom(root, Device{Path: "/dev/" + name, Name: name, Number: unix.Mkdev(254, minor)})
		if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "partition") {
			t.Errorf("a mapping of %s\nwant it refused because of the partition\ngot  %v", name, err)
		}
	}
}

// An error must name the mapping and a remedy, and must not quote the key.
func TestMappingThatCannotGrowIsRefusedWithTheRemedy(t *testing.T) {
	marked := func(t table, uuid string, flags uint32) table { t.uuid, t.flags = uuid, flags; return t }
	linear := one("linear", "254:0 0")
	for _, c := range []struct {
		name  string
		table table
		says  string
	}{
		{"stripes", one("striped", "2 128 254:0 0 254:16 0"), `dmsetup table "data"`},
		{"thin", one("thin", "253:1 1"), "lvextend"},
		{"a key in a keyring", one("crypt", "aes-xts-plain64 :64:logon:cryptsetup:uuid-d0 0 254:0 32768"), `cryptsetup resize "data"`},
		{"a wiped key", one("crypt", "aes-xts-plain64 - 0 254:0 32768"), `cryptsetup luksResume "data"`},
		{"integrity tags", one("crypt", "aes-gcm-random "+secret+" 0 254:0 0 1 integrity:28:aead"), "cryptsetup resize"},
		{"a volume of LVM", marked(linear, "LVM-abc", 0), "lvextend"},
		{"a mapping of a partition", marked(linear, "part1-devnode_254:0_", 0), "kpartx -u"},
		{"a format with a header at its end", marked(linear, "CRYPT-TCRYPT-abc", 0), "a larger disk"},
		{"suspended", marked(linear, "", dmSuspended), `dmsetup resume "data"`},
		{"read-only", marked(linear, "", dmReadOnly), "read-only"},
		{"a last target that cannot grow", table{name: "data", targets: []target{{0, 8, "linear", []byte("254:0 0")}, {8, 8, "zero", nil}}}, "zero"},
		{"targets in another order", table{name: "data", targets: []target{{0, 8, "linear", []byte("254:0 8")}, {8, 8, "linear", []byte("254:0 0")}}}, "behind its last target"},
		{"no target", table{name: "data"}, "no table"},
		{"an unknown form", one("crypt", secret+" "+secret+" "+secret+" "+secret+" "+secret), "not understood"},
		{"a bad sector size", one("crypt", "aes "+secret+" 0 254:0 0 1 sector_size:"+secret), "not understood"},
	} {
		l, err := layerOf(Device{Path: "/dev/dm-0"}, c.table)
		err = cmp.Or(refuseSuspended(Device{Path: "/dev/dm-0"}, c.table), err, l.fixed)
		if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), `/dev/dm-0 ("data")`) {
			t.Errorf("%s\nwant a FailedPrecondition that names the mapping and says %q\ngot  %v", c.name, c.says, err)
		}
		if err != nil && strings.Contains(err.Error(), secret[:8]) {
			t.Errorf("%s: the error quotes the key: %v", c.name, err)
		}
	}
}

func TestLoadedTableDiffersOnlyInItsLastLength(t *testing.T) {
	was := table{name: "data", targets: []target{{0, 100, "linear", []byte("254:16 7")}, {100, 24, "crypt", []byte("aes-xts-plain64 " + secret + " 0 254:0 32768")}}}
	message := loadMessage(0xfd03, was, 5000)
	if got := binary.LittleEndian.Uint64(message[40:]); got != 0xfd03 {
		t.Errorf("the mapping's number\nwant 0xfd03\ngot  %#x", got)
	}
	first := message[dmHeaderBytes:]
	second := first[binary.LittleEndian.Uint32(first[20:]):]
	for i, spec := range [][]byte{first, second} {
		want := was.targets[i]
		if i == 1 {
			want.length = 5000
		}
		if start, length := binary.LittleEndian.Uint64(spec), binary.LittleEndian.Uint64(spec[8:]); start != want.start || length != want.length ||
			cString(spec[24:dmSpecBytes]) != want.kind || cString(spec[dmSpecBytes:]) != string(want.params) {
			t.Errorf("target %d\nwant %d sectors from %d on\ngot  %d from %d on, or another text", i, want.length, want.start, length, start)
		}
	}
}

// An answer beyond a limit is refused before anything is made of it.
func TestTableBeyondItsLimitsIsRefused(t *testing.T) {
	many := make([]target, maxTargets+1)
	for i := range many {
		many[i] = target{uint64(i), 1, "linear", []byte("254:0 0")}
	}
	changed := func(at int, value uint32) []byte {
		b := answerOf(one("linear", "254:0 0"))
		binary.LittleEndian.PutUint32(b[at:], value)
		return b
	}
	unended := answerOf(one("linear", "254:0 0 fills its place")) // its zero is the last byte
	unended[len(unended)-1] = 'a'
	for name, answer := range map[string][]byte{
		"too many targets":              answerOf(table{targets: many}),
		"a mapping too long":            answerOf(table{targets: []target{{0, maxSectors + 1, "linear", []byte("254:0 0")}}}),
		"a gap":                         answerOf(table{targets: []target{{8, 8, "linear", []byte("254:0 0")}}}),
		"no header":                     make([]byte, dmHeaderBytes-1),
		"more data than the answer has": changed(12, 1<<30),
		"data before the header's end":  changed(16, 8),
		"more targets than there are":   changed(20, 2),
		"a next target before this one": changed(dmHeaderBytes+20, 8),
		"parameters without an end":     unended,
	} {
		if got, err := parseTable(answer); err == nil {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	if got, err := parseTable(answerOf(table{targets: many[:maxTargets]})); err != nil || len(got.targets) != maxTargets {
		t.Errorf("%d targets: %v", maxTargets, err)
	}
	if got, err := layerOf(Device{Path: "/dev/dm-0"}, one("linear", "254:0 18014398509481985")); err == nil {
		t.Errorf("an offset behind the end of the largest disk: got %+v", got)
	}
}

// FuzzTable gives the parser any answer of the kernel. An accepted table has targets without gaps,
// and a mapping that can grow has no more room than its disk.
func FuzzTable(f *testing.F) {
	f.Add(answerOf(one("linear", "254:0 2048")))
	f.Add(answerOf(one("crypt", "aes-xts-plain64 "+secret+" 0 254:0 32768 2 sector_size:4096 iv_large_sectors")))
	f.Add(answerOf(table{name: "two", targets: []target{{0, 100, "linear", []byte("254:16 7")}, {100, 24, "striped", []byte("1 8 254:0 0")}}}))
	f.Fuzz(func(t *testing.T, answer []byte) {
		got, err := parseTable(answer)
		if err != nil {
			return
		}
		end := uint64(0)
		for _, one := range got.targets {
			if one.start != end || one.length == 0 || one.start+one.length > maxSectors {
				t.Fatalf("a target of %d sectors at %d, behind %d", one.length, one.start, end)
			}
			end += one.length
		}
		l, err := layerOf(Device{Path: "/dev/dm-0"}, got)
		if err != nil {
			return
		}
		const disk = 1 << 40
		if got := (Stack{layers: []layer{l}}).Usable(disk); got > disk+l.start*sectorBytes {
			t.Errorf("%+v has room for %d bytes above a disk of %d", l, got, uint64(disk))
		}
	})
}
