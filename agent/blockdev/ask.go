package blockdev

import (
	"os"

	"golang.org/x/sys/unix"
)

// Ask reads the device's last page past every cache, so that the disk itself has to answer. It
// blocks as long as the disk does, and writes nothing. It reads the end of the device because a
// filesystem keeps nothing there that could be in the device's page cache; the kernel would write
// such a page back first.
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

// Flush makes the disk write out its volatile cache, and waits for the answer. A disk that still
// reads and writes may hang in a flush. Flush blocks as long as the disk does.
func Flush(path string) error {
	disk, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer disk.Close()
	return disk.Sync()
}
