package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// memoryFolder is where the kernel shows memory that can be plugged in
// (Documentation/admin-guide/mm/memory-hotplug.rst).
const memoryFolder = "sys/devices/system/memory"

// MemoryBlockSize returns by how many bytes the guest's memory can grow: 0 where its kernel cannot
// have it grow.
func (g Guest) MemoryBlockSize() (uint64, error) {
	path := filepath.Join("/", g.root, memoryFolder, "block_size_bytes")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	size, err := strconv.ParseUint(strings.TrimSpace(string(text)), 16, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return size, nil
}

// ProbesMemory reports whether the guest's kernel has to be told of memory that was plugged in.
func (g Guest) ProbesMemory() bool {
	_, err := os.Stat(filepath.Join("/", g.root, memoryFolder, "probe"))
	return err == nil
}
