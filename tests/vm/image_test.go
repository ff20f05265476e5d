package vm

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

const miB = 1 << 20

func TestCopyKeepsDataAndHoles(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	const size = 256 * miB
	image, err := os.Create(from)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	want := bytes.Repeat([]byte("data"), 32<<10)
	for _, at := range []int64{0, 100 * miB, size - int64(len(want))} {
		if _, err := image.WriteAt(want, at); err != nil {
			t.Fatal(err)
		}
	}
	if err := CopySparse(to, from); err != nil {
		t.Fatal(err)
	}
	copied, err := os.Open(to)
	if err != nil {
		t.Fatal(err)
	}
	defer copied.Close()
	for _, at := range []int64{0, 100 * miB, size - int64(len(want))} {
		got := make([]byte, len(want))
		if _, err := copied.ReadAt(got, at); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the data at %d is another, error %v", at, err)
		}
	}
	info, err := copied.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if used := info.Sys().(*syscall.Stat_t).Blocks * 512; info.Size() != size || used > miB {
		t.Errorf("want a size of %d bytes, with less than 1 MiB allocated\ngot  %d, %d", size, info.Size(), used)
	}
	if err := image.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if err := CopySparse(to, from); err != nil {
		t.Errorf("an empty image: %v", err)
	}
}
