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
	page, err := directPage()
	if err != nil {
		return err
	}
	defer unix.Munmap(page)
	_, err = disk.ReadAt(page, lastPage(size))
	return err
}

// directPage returns a page that is aligned for O_DIRECT. The caller unmaps it.
func directPage() ([]byte, error) {
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	return page, os.NewSyscallError("mmap", err)
}

// lastPage returns where the last whole page of a device of size bytes begins; 0 if it has none.
func lastPage(size uint64) int64 {
	page := int64(os.Getpagesize())
	return max(int64(size)/page*page-page, 0)
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
