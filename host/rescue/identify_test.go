package rescue

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// made returns an image that was formatted by the given program.
func made(t *testing.T, program string, args ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	must(t, os.WriteFile(path, nil, 0o600))
	bytes := int64(16 << 20)
	if program == "mkfs.xfs" {
		bytes = 304 << 20 // mkfs.xfs accepts no less
	}
	must(t, os.Truncate(path, bytes))
	if found, err := exec.LookPath("/usr/sbin/" + program); err == nil {
		program = found
	}
	out, err := exec.Command(program, append(args, path)...).CombinedOutput()
	if err != nil {
		t.Skipf("%s: %v: %s: apt-get install e2fsprogs xfsprogs util-linux, and run go test ./host/rescue", program, err, out)
	}
	return path
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func identified(t *testing.T, path string) (found, error) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	return identify(f)
}

func TestFilesystemsThatToolsMakeAreKnown(t *testing.T) {
	for want, path := range map[found]string{
		{fstype: "xfs"}:  made(t, "mkfs.xfs", "-q"),
		{fstype: "ext4"}: made(t, "mkfs.ext4", "-q", "-F"),
	} {
		if got, err := identified(t, path); err != nil || got != want {
			t.Errorf("%s\nwant %+v\ngot  %+v, error %v", path, want, got, err)
		}
	}
}

func TestRecordedErrorsOfExt4AreRead(t *testing.T) {
	path := made(t, "mkfs.ext4", "-q", "-F")
	for set, want := range map[string]found{
		"ssv state 3":             {fstype: "ext4", erred: true},
		"feature needs_recovery":  {fstype: "ext4", replays: true},
		"feature -needs_recovery": {fstype: "ext4"},
		"ssv state 1":             {fstype: "ext4"},
	} {
		for _, reset := range []string{"ssv state 1", "feature -needs_recovery", set} {
			if out, err := exec.Command("/usr/sbin/debugfs", "-w", "-R", reset, path).CombinedOutput(); err != nil {
				t.Fatalf("debugfs: %v\n%s", err, out)
			}
		}
		if got, err := identified(t, path); err != nil || got != want {
			t.Errorf("%s\nwant %+v\ngot  %+v, error %v", set, want, got, err)
		}
	}
}

// put returns zeros with the given words at the given offsets.
func put(words map[int]string) []byte {
	head := make([]byte, headBytes)
	for at, word := range words {
		copy(head[at:], word)
	}
	return head
}

// bootSector is an MBR with one partition.
const bootSector = "\x80\x00\x00\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x00\x10\x00"

func TestForeignDiskIsRefusedWithItsContents(t *testing.T) {
	const magic = "\x53\xef"
	for want, head := range map[string][]byte{
		"it is empty":                nil,
		"it holds nothing":           make([]byte, 4096),
		"begins with 00 01":          put(map[int]string{1: "\x01"}),
		"table (GPT), not xfs":       put(map[int]string{510: "\x55\xaa", 512: "EFI PART"}),
		"table (MBR), not xfs":       put(map[int]string{446: bootSector, 510: "\x55\xaa"}),
		"table (MBR) and also signs": put(map[int]string{446: bootSector, 510: "\x55\xaa", ext4Start + ext4Magic: magic}),
		"md array and also signs":    put(map[int]string{0: "XFSB", xfsLogStart + 7: "\x01", 4096: "\xfc\x4e\x2b\xa9"}),
		"signs of an xfs":            put(map[int]string{0: "XFSB", xfsLogStart + 7: "\x01", 446: bootSector, 510: "\x55\xaa"}),
		"a LUKS container":           put(map[int]string{0: "LUKS\xba\xbe"}),
		"a qcow2 image":              put(map[int]string{0: "QFI\xfb"}),
		"an LVM physical volume":     put(map[int]string{512: "LABELONE"}),
		"an md array":                put(map[int]string{4096: "\xfc\x4e\x2b\xa9"}),
		"swap space":                 put(map[int]string{4086: "SWAPSPACE2"}),
		"a btrfs":                    put(map[int]string{65600: "_BHRfS_M"}),
		"whose log is on another":    put(map[int]string{0: "XFSB"}),
		"a realtime section":         put(map[int]string{0: "XFSB", xfsRealtime + 7: "\x01", xfsLogStart + 7: "\x01"}),
		"the journal of an ext4":     put(map[int]string{ext4Start + ext4Magic: magic, ext4Start + ext4Incompat: "\x08"}),
		"journal is on another":      put(map[int]string{ext4Start + ext4Magic: magic, ext4Start + ext4Compat: "\x04"}),
		"begins with 58 46 53 42":    []byte("XFSB and no more"),
	} {
		if got, err := identify(bytes.NewReader(head)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("\nwant %q\ngot  %+v, error %v", want, got, err)
		}
	}
	// The two signature bytes of a boot sector without a partition do not make a partition table.
	head := put(map[int]string{510: "\x55\xaa", ext4Start + ext4Magic: magic})
	if got, err := identify(bytes.NewReader(head)); err != nil || got.fstype != "ext4" {
		t.Errorf("ext4 behind a boot loader\nwant it known\ngot  %+v, error %v", got, err)
	}
}

func FuzzIdentify(f *testing.F) {
	f.Add(put(map[int]string{0: "XFSB", xfsLogStart + 7: "\x01"}))
	f.Add(put(map[int]string{ext4Start + ext4Magic: "\x53\xef"}))
	f.Add(put(map[int]string{446: bootSector, 510: "\x55\xaa", ext4Start + ext4Magic: "\x53\xef"}))
	f.Add(put(map[int]string{0: "XFSB", xfsLogStart + 7: "\x01", 4096: "\xfc\x4e\x2b\xa9"}))
	f.Add([]byte("XFSB"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, head []byte) {
		got, err := identify(bytes.NewReader(head))
		switch {
		case err != nil && got != found{}:
			t.Errorf("both %+v and %v", got, err)
		case err == nil && got.fstype == "xfs":
			if !has(head, 0, xfsMagic) || foreignTo(head) != "" {
				t.Error("an xfs without its magic number, or with another's")
			}
		case err == nil:
			if got.fstype != "ext4" || binary.LittleEndian.Uint16(head[ext4Start+ext4Magic:]) != ext4MagicValue || foreignTo(head) != "" {
				t.Errorf("want an ext4 and nothing else\ngot  %+v", got)
			}
		}
		if err != nil && printable(err.Error()) != err.Error() {
			t.Errorf("unprintable bytes: %q", err)
		}
	})
}

// If an array's superblock is at its members' ends, its filesystem begins at the members'
// beginnings. A write to one member would make the members differ.
func TestMemberOfAnArrayIsRefusedByItsEnd(t *testing.T) {
	const size = 1<<20 + 512*3
	for name, at := range map[string]int64{"version 1.0": (size/512 - 16) &^ 7 * 512, "version 0.90": size&^0xffff - 0x10000} {
		disk := make([]byte, size)
		if err := refuseMember(bytes.NewReader(disk)); err != nil {
			t.Errorf("not a member: %v", err)
		}
		copy(disk[at:], "\xfc\x4e\x2b\xa9")
		if err := refuseMember(bytes.NewReader(disk)); err == nil || !strings.Contains(err.Error(), "md array") {
			t.Errorf("%s\nwant it refused\ngot  %v", name, err)
		}
	}
	if err := refuseMember(bytes.NewReader(nil)); err != nil {
		t.Errorf("an empty disk: %v", err)
	}
}
