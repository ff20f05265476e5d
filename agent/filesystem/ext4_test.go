package filesystem

import (
	"context"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/agent/errkind"
)

// makeExt4 formats an image as a user would, with the real mkfs.
func makeExt4(t testing.TB, bytes int64, options ...string) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "ext4.img")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, bytes); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", append(append([]string{"-q", "-F"}, options...), image)...).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v\n%s", err, out)
	}
	return image
}

func TestSuperblockOfRealMkfs(t *testing.T) {
	for name, test := range map[string]struct {
		bytes     int64
		options   []string
		blockSize uint64
		first     uint64
		wide      bool
	}{
		"4 KiB blocks, the default": {256 << 20, []string{"-b", "4096"}, 4096, 0, true},
		"1 KiB blocks":              {64 << 20, []string{"-b", "1024"}, 1024, 1, true},
		"without 64bit":             {256 << 20, []string{"-b", "4096", "-O", "^64bit"}, 4096, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := readExt4Super(open(t, makeExt4(t, test.bytes, append(test.options, "-O", "has_journal")...)))
			if err != nil {
				t.Fatal(err)
			}
			if s.blockSize != test.blockSize || s.blocks*s.blockSize != uint64(test.bytes) || s.firstBlock != test.first || s.wide != test.wide || s.errors || s.errorCount != 0 {
				t.Errorf("got %+v", s)
			}
		})
	}
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return file
}

func TestStateFlagAloneCountsAsARecordedError(t *testing.T) {
	image := makeExt4(t, 64<<20)
	if out, err := exec.Command("debugfs", "-w", "-R", "ssv state 2", image).CombinedOutput(); err != nil {
		t.Fatalf("debugfs: %v\n%s", err, out)
	}
	if count, err := ext4RecordedErrors(open(t, image)); err != nil || count != 1 {
		t.Errorf("\nwant 1\ngot  %d, error %v", count, err)
	}
}

func TestFilesystemWithout64bitEndsBefore2To32Blocks(t *testing.T) {
	image := makeExt4(t, 64<<20, "-O", "^64bit")
	err := ext4.Grow(t.Context(), Mounted{Disk: open(t, image)}, 1<<32)
	if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "64bit") {
		t.Errorf("want a refusal that names the feature\ngot  %v", err)
	}
}

func TestExt3IsKnownByItsFeatures(t *testing.T) {
	for want, options := range map[string][]string{
		"ext3":                    {"-t", "ext3", "-b", "4096"},
		"ext4":                    {"-b", "4096", "-O", "has_journal"},
		"ext4, without a journal": {"-t", "ext3", "-O", "^has_journal"},
		"ext4, its extents alone": {"-t", "ext3", "-O", "extents"},
		"ext4, its flags alone":   {"-t", "ext3", "-O", "huge_file"},
	} {
		disk := open(t, makeExt4(t, 64<<20, options...))
		if is, _, _ := strings.Cut(want, ","); Identify(disk) != is {
			t.Errorf("mkfs.ext4 %v\nwant %s\ngot  %s", options, want, Identify(disk))
		}
	}
}

// ext3 cannot have the 64bit feature. Its own growth stops there, and so does an ext3 that is
// mounted as ext4.
func TestExt3EndsBefore2To32Blocks(t *testing.T) {
	m := Mounted{Disk: open(t, makeExt4(t, 64<<20, "-t", "ext3", "-b", "4096"))}
	for name, grow := range map[string]func(uint64) error{
		"checked":         func(blocks uint64) error { return ext3.CanGrow(m, blocks) },
		"grown":           func(blocks uint64) error { return ext3.Grow(t.Context(), m, blocks) },
		"checked as ext4": func(blocks uint64) error { return ext4.CanGrow(m, blocks) },
	} {
		err := grow(1 << 32)
		if errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "2^32 blocks of 4096 bytes") || !strings.Contains(err.Error(), "tune2fs -O extents") {
			t.Errorf("%s\nwant a refusal with the way to an ext4\ngot  %v", name, err)
		}
	}
	if err := ext3.CanGrow(m, 1<<32-1); err != nil {
		t.Errorf("as far as 32 bits go: %v", err)
	}
}

// beside is a context that calls do each time a growth looks whether it has ended, which is before
// each step.
type beside struct {
	context.Context
	do func()
}

func (b beside) Err() error {
	b.do()
	return b.Context.Err()
}

// The kernel refuses with EINVAL to grow an ext4 whose reserved descriptors are damaged, and also
// to shrink one that somebody else has grown further meanwhile, which is no damage. /dev/urandom
// answers unknown ioctls with EINVAL, too.
func TestExt4ThatSomebodyElseHasGrownFurtherIsNotCalledDamaged(t *testing.T) {
	image := makeExt4(t, 64<<20, "-b", "4096")
	m := Mounted{Disk: open(t, image), Dir: open(t, "/dev/urandom")}
	const blocks = 64 << 20 / 4096
	if err := ext4.Grow(t.Context(), m, 2*blocks); errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("with the size as it was\nwant the damage\ngot  %v", err)
	}
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	somebody := beside{t.Context(), func() {
		if _, err := file.WriteAt(binary.LittleEndian.AppendUint32(nil, 3*blocks), ext4SuperOffset+4); err != nil {
			t.Error(err)
		}
	}}
	if err := ext4.Grow(somebody, m, 2*blocks); err != nil {
		t.Errorf("grown further by somebody else\nwant success\ngot  %v", err)
	}
}

func TestStepsEndAtGroupsAndAtTheGoal(t *testing.T) {
	s := ext4Super{blockSize: 1024, blocksPerGroup: 8192, firstBlock: 1}
	goal := uint64(100<<30) / 1024
	steps := 0
	for at := uint64(70000); at < goal; steps++ {
		next := s.step(at, goal)
		if next <= at || next > goal || next != goal && (next-s.firstBlock)%s.blocksPerGroup != 0 {
			t.Fatalf("step from %d to %d", at, next)
		}
		at = next
	}
	if steps < 6 || steps > 8 {
		t.Errorf("100 GiB in %d steps of 16", steps)
	}
}

func FuzzExt4Super(f *testing.F) {
	image, err := os.ReadFile(makeExt4(f, 8<<20))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(image[ext4SuperOffset : ext4SuperOffset+ext4SuperSize])
	f.Add(make([]byte, ext4SuperSize))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseExt4Super(b)
		if err != nil {
			return
		}
		if s.blockSize < 1024 || s.blockSize > 65536 || s.blocks > (1<<63)/s.blockSize || s.blocksPerGroup == 0 {
			t.Errorf("an invalid superblock was accepted: %+v", s)
		}
		if next := s.step(s.blocks, s.blocks+1); next != s.blocks+1 || s.slack() < s.clusterBlocks {
			t.Errorf("a step of one block ends at %d of %d, slack %d", next, s.blocks+1, s.slack())
		}
	})
}

// CanGrow must refuse this before the disk grows: the kernel would refuse it only afterwards.
func TestSizeThatExt4CannotReachIsRefusedWithTheReason(t *testing.T) {
	for name, test := range map[string]struct {
		options []string
		blocks  uint64
		says    string // "" means success
	}{
		"as it is":                          {[]string{"-b", "4096", "-O", "^64bit"}, 64 << 20 / 4096, ""},
		"as far as 32 bits go":              {[]string{"-b", "4096", "-O", "^64bit"}, 1<<32 - 1, ""},
		"further, without 64bit":            {[]string{"-b", "4096", "-O", "^64bit"}, 1 << 32, "64bit"},
		"sparse_super2":                     {[]string{"-b", "4096", "-O", "sparse_super2,^resize_inode"}, 1 << 20, "sparse_super2"},
		"sparse_super2, which has the size": {[]string{"-b", "4096", "-O", "sparse_super2,^resize_inode"}, 64 << 20 / 4096, ""},
		"more inodes than there can be":     {[]string{"-b", "4096", "-i", "1024"}, 1 << 36, "2^32 inodes"},
	} {
		t.Run(name, func(t *testing.T) {
			image := makeExt4(t, 64<<20, test.options...)
			err := ext4.CanGrow(Mounted{Disk: open(t, image)}, test.blocks)
			if test.says == "" && err == nil {
				return
			}
			if test.says == "" || errkind.Of(err) != errkind.FailedPrecondition || !strings.Contains(err.Error(), test.says) {
				t.Errorf("\nwant a refusal with %q\ngot  %v", test.says, err)
			}
		})
	}
}
