package filesystem

import (
	"os"
	"os/exec"
	"testing"
)

// Found must name a mark that is in the bytes, wherever they end.
func FuzzFound(f *testing.F) {
	for _, m := range marks {
		begin := make([]byte, foundBytes)
		copy(begin[m.at:], m.bytes)
		f.Add(begin, m.at+len(m.bytes)-1)
	}
	f.Add([]byte{}, 0)
	f.Fuzz(func(t *testing.T, begin []byte, short int) {
		got := found(begin)
		if again := found(append([]byte{}, begin...)); again != got {
			t.Errorf("%q, and then %q", got, again)
		}
		if short >= 0 && short < len(begin) {
			found(begin[:short])
		}
		if len(begin) == 0 && got != "" {
			t.Errorf("%q is found in nothing", got)
		}
	})
}

// A mark that is cut off by the end of the disk does not count.
func TestMagicNumberIsFoundOnlyIfComplete(t *testing.T) {
	for _, m := range marks {
		begin := make([]byte, foundBytes)
		copy(begin[m.at:], m.bytes)
		if got := found(begin); got != m.name {
			t.Errorf("%q at %d\nwant %s\ngot  %s", m.bytes, m.at, m.name, got)
		}
		if got := found(begin[:m.at+len(m.bytes)]); got != m.name {
			t.Errorf("%q at the end\nwant %s\ngot  %s", m.bytes, m.name, got)
		}
		if got := found(begin[:m.at+len(m.bytes)-1]); got == m.name {
			t.Errorf("%q, cut off\nwant a name other than %s", m.bytes, got)
		}
	}
}

func TestSuperblockThatMkfsWroteHasNoFault(t *testing.T) {
	for _, options := range [][]string{{}, {"-s", "size=4096"}, {"-m", "crc=0,finobt=0,rmapbt=0,reflink=0,inobtcount=0,bigtime=0", "-i", "sparse=0"}} {
		if fault := xfsSuperFault(open(t, makeXFS(t, 304<<20, options...))); fault != "" {
			t.Errorf("mkfs.xfs %v\ngot  %s", options, fault)
		}
	}
}

// xfs_db writes fields with a valid checksum, as a kernel would.
func TestFaultOfASuperblockIsNamed(t *testing.T) {
	for field, want := range map[string]string{
		"inprogress 1":           "the mkfs.xfs or xfs_copy that made it did not finish (inprogress)",
		"features_incompat 0x1b": "it is marked as needing repair (needsrepair)",
		"sectsize 513":           "its superblock is damaged: it has sectors of 513 bytes",
	} {
		image := makeXFS(t, 304<<20)
		if out, err := exec.Command("xfs_db", "-x", "-c", "sb 0", "-c", "write -d "+field, image).CombinedOutput(); err != nil {
			t.Fatalf("xfs_db: %v: %s", err, out)
		}
		if got := xfsSuperFault(open(t, image)); got != want {
			t.Errorf("%s\nwant %s\ngot  %s", field, want, got)
		}
	}
}

// Any change in a superblock invalidates its checksum.
func FuzzXFSFault(f *testing.F) {
	image, err := os.ReadFile(makeXFS(f, 304<<20))
	if err != nil {
		f.Fatal(err)
	}
	sector := image[:512]
	f.Add(sector[:], 8, byte(1))
	f.Add([]byte{}, 0, byte(0))
	f.Fuzz(func(t *testing.T, b []byte, at int, flip byte) {
		xfsFaultOf(b)
		if at < 0 || at >= len(sector) || flip == 0 {
			return
		}
		changed := append([]byte{}, sector...)
		if changed[at] ^= flip; at != xfsSuperVersion && at != xfsSuperVersion+1 && xfsFaultOf(changed) == "" {
			t.Errorf("byte %d changed by %#x: no fault", at, flip)
		}
	})
}
