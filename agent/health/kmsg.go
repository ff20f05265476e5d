package health

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// kmsgRecord is more than the kernel puts into one record (PRINTK_MESSAGE_MAX
// in kernel/printk/internal.h); a shorter buffer gets EINVAL.
const kmsgRecord = 8192

// followKmsg calls each with every message that the kernel itself logs from now
// on (Documentation/ABI/testing/dev-kmsg), or behind the record of a number other
// than 0, and with nil where some were overwritten before they were read, and
// at the end from which it begins. It returns when ctx ends.
func followKmsg(ctx context.Context, after uint64, each func(sequence uint64, message []byte)) error {
	file, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	if after == 0 {
		if after, err = skipKmsg(file); err != nil {
			return err
		}
		each(after, nil)
	}
	stop := context.AfterFunc(ctx, func() { file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, kmsgRecord)
	for {
		n, err := file.Read(buf)
		switch {
		case err == nil:
			sequence := sequenceOf(buf[:n])
			if message, ok := messageOf(buf[:n]); ok && sequence > after {
				each(sequence, message)
			}
		case errors.Is(err, unix.EPIPE):
			each(0, nil)
		case ctx.Err() != nil:
			return ctx.Err()
		default:
			return err
		}
	}
}

// skipKmsg reads to the log's end, and returns the number of its last record.
func skipKmsg(file *os.File) (last uint64, err error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return 0, err
	}
	buf := make([]byte, kmsgRecord)
	var readErr error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, err := unix.Read(int(fd), buf)
			switch {
			case err == nil:
				last = sequenceOf(buf[:n])
			case errors.Is(err, unix.EAGAIN):
				return true
			case !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.EINTR):
				readErr = err
				return true
			}
		}
	})
	return last, errors.Join(err, readErr)
}

// messageOf returns the text of a record "PRIORITY,…;text\n KEY=value\n…", and
// whether the kernel is its author: any process with the right may write to the
// log, but not as facility 0.
func messageOf(record []byte) (text []byte, kernels bool) {
	prefix, text, _ := bytes.Cut(record, []byte{';'})
	text, _, _ = bytes.Cut(text, []byte{'\n'})
	number, _, _ := bytes.Cut(prefix, []byte{','})
	priority, err := strconv.ParseUint(string(number), 10, 32)
	return text, err == nil && priority>>3 == 0
}

// sequenceOf returns the number of a record "PRIORITY,NUMBER,…;text", or 0 where
// it has none. The kernel's first is 0 too, and comes before any disk's.
func sequenceOf(record []byte) uint64 {
	prefix, _, _ := bytes.Cut(record, []byte{';'})
	_, rest, _ := bytes.Cut(prefix, []byte{','})
	number, _, _ := bytes.Cut(rest, []byte{','})
	sequence, err := strconv.ParseUint(string(number), 10, 64)
	if err != nil {
		return 0
	}
	return sequence
}

// isReadError tells whether a message is the block layer's about a read
// (blk_print_req_error in block/blk-mq.c); op 0x0 is REQ_OP_READ.
func isReadError(message []byte) bool {
	return bytes.Contains(message, []byte("error, dev ")) && bytes.Contains(message, []byte("op 0x0:(READ)"))
}

// mentions tells whether a message holds name as a word of its own: "vda" is
// in "XFS (vda):", "dev vda, sector 8" and "device vda-8", not in "vdaa".
func mentions(message []byte, name string) bool {
	for at := 0; at+len(name) <= len(message); at++ {
		next := bytes.Index(message[at:], []byte(name))
		if next < 0 {
			return false
		}
		at += next
		end := at + len(name)
		if (at == 0 || !wordByte(message[at-1])) && (end == len(message) || !wordByte(message[end])) {
			return true
		}
	}
	return false
}

func wordByte(b byte) bool {
	return b == '_' || '0' <= b && b <= '9' || 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z'
}
