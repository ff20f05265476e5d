package blockdev

import (
	"os"

	"golang.org/x/sys/unix"
)

// Ask has the disk itself answer: it reads the device's last page past every cache. It
// waits for as long as the disk does, and writes nothing. The end is read because a
// filesystem keeps nothing there that is in the device's own cache, which would be
// written back first.
func Ask(path string) error {
	disk, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer disk.Close()
	size, err := SizeOf(disk)
	if err != nil {
		return err
	}
	bytes := os.Getpagesize()
	page, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer unix.Munmap(page)
	at := int64(size)/int64(bytes)*int64(bytes) - int64(bytes)
	_, err = disk.ReadAt(page, max(at, 0))
	return err
}

// Flush has the disk itself take what it keeps in a volatile cache, and answer. A disk that
// reads and writes may hang in that alone. It waits for as long as the disk does.
func Flush(path string) error {
	disk, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer disk.Close()
	return disk.Sync()
}
