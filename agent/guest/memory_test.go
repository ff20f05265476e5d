package guest

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMemoryBlockSizeComesFromTheKernel(t *testing.T) {
	root := t.TempDir()
	g := newGuest(root, true, nil)
	if size, err := g.MemoryBlockSize(); size != 0 || err != nil || g.ProbesMemory() {
		t.Errorf("a kernel without memory hotplug\nwant 0 bytes, no probe\ngot  %d, %v, error %v", size, g.ProbesMemory(), err)
	}
	folder := filepath.Join(root, memoryFolder)
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("block_size_bytes", "8000000\n")
	write("probe", "")
	if size, err := g.MemoryBlockSize(); size != 128<<20 || err != nil || !g.ProbesMemory() {
		t.Errorf("want %d bytes, and a probe\ngot  %d, %v, error %v", 128<<20, size, g.ProbesMemory(), err)
	}
	write("block_size_bytes", "128 MiB\n")
	if size, err := g.MemoryBlockSize(); err == nil {
		t.Errorf("a text that is not a number\nwant an error\ngot  %d", size)
	}
}
