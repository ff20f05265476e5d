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

// kmsgRecord is more than the largest record (PRINTK_MESSAGE_MAX in kernel/printk/internal.h); a
// read into a shorter buffer returns EINVAL.
const kmsgRecord = 8192

// followKmsg calls each with every message that the kernel itself logs from now on
// (Documentation/ABI/testing/dev-kmsg), or after the record with the number after if that is not 0.
// It calls each with nil if records were overwritten before they were read, and once at the end of
// the log if it starts there. It returns when ctx ends.
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

// skipKmsg reads to the end of the log and returns the number of the last record.
func skipKmsg(file *os.File) (last uint64, err error) {
	err = readKmsg(file, func(record []byte) { last = sequenceOf(record) })
	return last, err
}

// messageOf returns the text of a record "PRIORITY,…;text\n KEY=value\n…", and whether the kernel
// has written it: a process with the right to do so may write to the log, but not as facility 0.
func messageOf(record []byte) (text []byte, kernels bool) {
	prefix, text, _ := bytes.Cut(record, []byte{';'})
	text, _, _ = bytes.Cut(text, []byte{'\n'})
	number, _, _ := bytes.Cut(prefix, []byte{','})
	priority, err := strconv.ParseUint(string(number), 10, 32)
	return text, err == nil && priority>>3 == 0
}

// sequenceOf returns the number of a record "PRIORITY,NUMBER,…;text", or 0 if it has none. The
// kernel's first record also has the number 0, and precedes all records about disks.
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
