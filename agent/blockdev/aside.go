package blockdev

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// AskAside is Ask, but no thread waits for the disk: the kernel reads in the background
// (io_submit(2)), and only the calling goroutine waits. It fails if the kernel was built without
// CONFIG_AIO.
func AskAside(path string) (err error) {
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
	// The kernel writes to the page until the read has ended, and io_destroy waits for that. So
	// both calls follow the end of the read.
	defer unix.Munmap(page)
	answered, number, err := event()
	if err != nil {
		return err
	}
	defer answered.Close()
	q, err := newQueue(1)
	if err != nil {
		return err
	}
	defer q.destroy()
	read := iocb{
		file: uint32(disk.Fd()), buffer: uint64(uintptr(unsafe.Pointer(&page[0]))), bytes: uint64(len(page)), offset: lastPage(size),
		flags: iocbFlagEvent, event: uint32(number),
	}
	if _, err := q.submit([]*iocb{&read}); err != nil {
		return err
	}
	_, err = answered.Read(make([]byte, 8))
	return err
}

// event returns an eventfd that a goroutine can read without a thread.
func event() (file *os.File, number int, err error) {
	number, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, 0, os.NewSyscallError("eventfd", err)
	}
	return os.NewFile(uintptr(number), "eventfd"), number, nil
}
