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
	var queue uintptr // aio_context_t
	if _, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&queue)), 0); errno != 0 {
		return os.NewSyscallError("io_setup", errno)
	}
	defer unix.Syscall(unix.SYS_IO_DESTROY, queue, 0, 0)
	read := iocb{
		file: uint32(disk.Fd()), buffer: uint64(uintptr(unsafe.Pointer(&page[0]))), bytes: uint64(len(page)), offset: lastPage(size),
		flags: iocbFlagEvent, event: uint32(number),
	}
	reads := &read
	if _, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, queue, 1, uintptr(unsafe.Pointer(&reads))); errno != 0 {
		return os.NewSyscallError("io_submit", errno)
	}
	_, err = answered.Read(make([]byte, 8))
	return err
}

// iocb is struct iocb (include/uapi/linux/aio_abi.h) on a little-endian machine. Opcode 0 is
// IOCB_CMD_PREAD.
type iocb struct {
	_      uint64 // data
	_, _   uint32 // key, rw_flags
	_      uint16 // opcode
	_      int16  // reqprio
	file   uint32
	buffer uint64
	bytes  uint64
	offset int64
	_      uint64
	flags  uint32
	event  uint32 // with iocbFlagEvent: the eventfd that counts the end of the read
}

const iocbFlagEvent = 1 // IOCB_FLAG_RESFD

// event returns an eventfd that a goroutine can read without a thread.
func event() (file *os.File, number int, err error) {
	number, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, 0, os.NewSyscallError("eventfd", err)
	}
	return os.NewFile(uintptr(number), "eventfd"), number, nil
}
