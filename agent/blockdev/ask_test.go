package blockdev

import (
	"errors"
	"io/fs"
	"path/filepath"
	"testing"

	"github.com/directvol/directvol/agent/mount/mounttest"
)

func TestDiskIsAskedWithAndWithoutAThread(t *testing.T) {
	disk := mounttest.Attach(t, mounttest.Image(t, "ext4"))
	for name, ask := range map[string]func(string) error{"Ask": Ask, "AskAside": AskAside} {
		for range 3 { // nothing of a read is left to the next one
			if err := ask(disk); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := ask(filepath.Join(t.TempDir(), "missing")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s of a disk that is gone\nwant %v\ngot  %v", name, fs.ErrNotExist, err)
		}
	}
}

func TestLastPageIsWithinTheDisk(t *testing.T) {
	for size, want := range map[uint64]int64{0: 0, 512: 0, 4096: 0, 4097: 0, 8192: 4096, 8704: 4096, 1 << 30: 1<<30 - 4096} {
		if got := lastPage(size); got != want {
			t.Errorf("disk of %d bytes\nwant %d\ngot  %d", size, want, got)
		}
	}
}
