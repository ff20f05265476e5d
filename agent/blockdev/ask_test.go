package blockdev

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

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

func TestPartsOfADiskAreReadAtOnce(t *testing.T) {
	const size, parts = 4096, 24
	image := filepath.Join(t.TempDir(), "image")
	var content []byte
	for i := range parts {
		content = append(content, bytes.Repeat([]byte{byte(i + 1)}, size)...)
	}
	if err := os.WriteFile(image, content, 0o600); err != nil {
		t.Fatal(err)
	}
	disk, err := os.OpenFile(image, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	page, err := unix.Mmap(-1, 0, parts*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page)
	reader, err := NewParts(disk, parts)
	if err != nil {
		t.Skipf("it reads by io_submit: %v: run it on a kernel with CONFIG_AIO", err)
	}
	defer reader.Close()
	var offsets []uint64
	for i := range parts {
		offsets = append(offsets, uint64(parts-1-i)*size)
	}
	if err := reader.Read(page, offsets); err != nil {
		t.Fatal(err)
	}
	for i := range parts {
		if want := bytes.Repeat([]byte{byte(parts - i)}, size); !bytes.Equal(page[i*size:][:size], want) {
			t.Errorf("part %d\nwant bytes of %d\ngot  of %d", i, want[0], page[i*size])
		}
	}
	offsets[7] = parts * size
	if err := reader.Read(page, offsets); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("one is past the end\nwant %v\ngot  %v", io.ErrUnexpectedEOF, err)
	}
	offsets[7] = 1
	if err := reader.Read(page, offsets); !errors.Is(err, unix.EINVAL) {
		t.Errorf("one is not aligned\nwant %v\ngot  %v", unix.EINVAL, err)
	}
}

func TestLastPageIsWithinTheDisk(t *testing.T) {
	for size, want := range map[uint64]int64{0: 0, 512: 0, 4096: 0, 4097: 0, 8192: 4096, 8704: 4096, 1 << 30: 1<<30 - 4096} {
		if got := lastPage(size); got != want {
			t.Errorf("disk of %d bytes\nwant %d\ngot  %d", size, want, got)
		}
	}
}
