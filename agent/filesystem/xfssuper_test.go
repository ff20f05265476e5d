package filesystem

import (
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// makeXFS formats an image as a user would, with the real mkfs.
func makeXFS(t testing.TB, bytes int64, options ...string) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "xfs.img")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, bytes); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.xfs", append(append([]string{"-q"}, options...), image)...).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.xfs: %v\n%s", err, out)
	}
	return image
}

func TestXFSSuperblockOfRealMkfs(t *testing.T) {
	s, err := readXFSSuper(open(t, makeXFS(t, 304<<20)), 0)
	if err != nil || s.blockSize != 4096 || s.blocks != 304<<20/4096 || s.groups != 4 || s.groupBlocks*s.groups != s.blocks {
		t.Errorf("got %+v, error %v", s, err)
	}
}

// An interrupted growth leaves the primary superblock as it was, and others with the new size. This
// test makes such a disk by hand; tests/cuts makes the kernel do it.
func TestInterruptedGrowthIsNamedWithItsRemedy(t *testing.T) {
	image := makeXFS(t, 304<<20)
	if said := xfsMountRefused(open(t, image), unix.EUCLEAN); strings.Contains(said, "its growth from") || !strings.Contains(said, "directvol rescue") {
		t.Errorf("xfs that never grew\ngot %s", said)
	}
	file, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteAt(binary.BigEndian.AppendUint64(nil, 500<<20/4096), 76<<20+8); err != nil {
		t.Fatal(err)
	}
	said := xfsMountRefused(open(t, image), unix.EUCLEAN)
	for _, want := range []string{"its growth from 318767104 to 524288000 bytes was cut off", "directvol rescue DISK"} {
		if !strings.Contains(said, want) {
			t.Errorf("\nwant it to say %q\ngot  %s", want, said)
		}
	}
	if said := xfsMountRefused(open(t, image), unix.EINVAL); said != "" {
		t.Errorf("another error\nwant nothing\ngot  %s", said)
	}
}

func FuzzXFSSuper(f *testing.F) {
	image, err := os.ReadFile(makeXFS(f, 304<<20))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(image[:xfsSuperSize], image[76<<20:76<<20+xfsSuperSize])
	f.Add(make([]byte, xfsSuperSize), []byte("XFSB"))
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, primary, second []byte) {
		s, err := parseXFSSuper(primary)
		if err != nil {
			if !errors.Is(err, errNoXFS) && !strings.HasPrefix(string(primary), "XFSB") {
				t.Errorf("%q: %v", primary, err)
			}
			return
		}
		if s.groups*s.groupBlocks > (1<<62)/s.blockSize {
			t.Errorf("an invalid superblock was accepted: %+v", s)
		}
		// A disk whose other group is wherever this superblock says.
		disk, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer disk.Close()
		if at := s.groupBlocks * s.blockSize; at < 1<<30 {
			disk.WriteAt(second, int64(at))
		}
		if to := s.grownTo(disk); to != 0 && to <= s.blocks {
			t.Errorf("it grew from %d to %d blocks", s.blocks, to)
		}
	})
}
