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

// memoryFolder is where the kernel shows hot-pluggable memory
// (Documentation/admin-guide/mm/memory-hotplug.rst).
const memoryFolder = "sys/devices/system/memory"

// MemoryBlockSize returns the unit, in bytes, by which the guest's memory can grow, or 0 if its
// kernel does not support growth.
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

// ProbesMemory reports whether the guest's kernel must be told about memory that was plugged in.
func (g Guest) ProbesMemory() bool {
	_, err := os.Stat(filepath.Join("/", g.root, memoryFolder, "probe"))
	return err == nil
}
