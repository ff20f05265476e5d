package blockdev

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// queue is an aio_context_t: requests that the kernel carries out in the background (io_submit(2)).
type queue uintptr

func newQueue(requests int) (q queue, err error) {
	_, _, errno := unix.Syscall(unix.SYS_IO_SETUP, uintptr(requests), uintptr(unsafe.Pointer(&q)), 0)
	if errno != 0 {
		return 0, os.NewSyscallError("io_setup", errno)
	}
	return q, nil
}

// destroy waits for the end of every request.
func (q queue) destroy() { unix.Syscall(unix.SYS_IO_DESTROY, uintptr(q), 0, 0) }

// submit submits requests, and returns how many it has submitted.
func (q queue) submit(all []*iocb) (submitted int, err error) {
	for submitted < len(all) {
		n, _, errno := unix.Syscall(unix.SYS_IO_SUBMIT, uintptr(q), uintptr(len(all)-submitted), uintptr(unsafe.Pointer(&all[submitted])))
		if errno != 0 {
			return submitted, os.NewSyscallError("io_submit", errno)
		}
		submitted += int(n)
	}
	return submitted, nil
}

// await returns the results of n requests, in any order.
func (q queue) await(n int) ([]ioEvent, error) {
	events := make([]ioEvent, n)
	for got := 0; got < n; {
		more, _, errno := unix.Syscall6(unix.SYS_IO_GETEVENTS, uintptr(q), 1, uintptr(n-got), uintptr(unsafe.Pointer(&events[got])), 0, 0)
		if errno != 0 && errno != unix.EINTR {
			return nil, os.NewSyscallError("io_getevents", errno)
		}
		if errno == 0 {
			got += int(more)
		}
	}
	return events, nil
}

// ioEvent is struct io_event (include/uapi/linux/aio_abi.h).
type ioEvent struct {
	data, object uint64
	result       int64 // bytes, or a negative errno
	_            int64
}

// iocb is struct iocb (include/uapi/linux/aio_abi.h) on a little-endian machine. Opcode 0 is
// IOCB_CMD_PREAD.
type iocb struct {
	data   uint64 // is returned in the event
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

// Parts reads parts of a disk many at once.
type Parts struct {
	disk  *os.File
	queue queue
}

// NewParts returns a reader of at most most parts at once. disk is open with O_DIRECT. NewParts
// fails if the kernel was built without CONFIG_AIO. It takes a moment, and Close takes longer, in
// the background: for a few reads they are not worth while.
func NewParts(disk *os.File, most int) (*Parts, error) {
	q, err := newQueue(most)
	if err != nil {
		return nil, err
	}
	return &Parts{disk, q}, nil
}

// Close ends the reader. The disk stays open. The kernel waits for all its processors, which takes
// longer than many reads, and nothing is in flight: so nobody waits for Close.
func (p *Parts) Close() { go p.queue.destroy() }

// Read reads a part at each offset into page, one behind the other. page was mapped by mmap, and a
// part has len(page) divided by the number of offsets. The calling thread waits for the disk. When
// Read returns, nothing is in flight.
func (p *Parts) Read(page []byte, offsets []uint64) error {
	each := len(page) / len(offsets)
	reads, all := make([]iocb, len(offsets)), make([]*iocb, len(offsets))
	for i, at := range offsets {
		reads[i] = iocb{data: uint64(i), file: uint32(p.disk.Fd()), buffer: uint64(uintptr(unsafe.Pointer(&page[i*each]))), bytes: uint64(each), offset: int64(at)}
		all[i] = &reads[i]
	}
	submitted, submitErr := p.queue.submit(all)
	events, err := p.queue.await(submitted)
	if err := errors.Join(submitErr, err); err != nil {
		return err
	}
	for _, e := range events {
		switch {
		case e.result < 0:
			return &fs.PathError{Op: "read", Path: p.disk.Name(), Err: unix.Errno(-e.result)}
		case int(e.result) < each:
			return fmt.Errorf("%s at %d: %w", p.disk.Name(), offsets[e.data], io.ErrUnexpectedEOF)
		}
	}
	return nil
}
