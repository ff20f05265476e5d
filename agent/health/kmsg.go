package health

import (
	"bytes"
	"context"
	"errors"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/directvol/directvol/agent/blockdev"
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

// line is the content of a kernel message about a block device.
type line struct {
	device  string // the kernel's name
	request bool   // it reports a failed request, at a sector
	sector  uint64 // of the whole disk, even if the device is a partition
	read    bool   // a read failed
	write   bool   // a write or a flush failed
	stopped bool   // the device's ext4 has made itself read-only
	// remounted is set if somebody has remounted the filesystem.
	remounted bool
	shrunk    bool   // the device's size has decreased
	sectors   uint64 // the new size, in units of 512 bytes
}

// Messages that name a device. Each pattern matches from the first word on, because elsewhere a
// name may be any program's, in a line about the program's fault (show_signal_msg in
// arch/x86/mm/fault.c). A program's name has at most 15 bytes and is followed by "[", so no such
// line matches a failed request.
var (
	// blk_print_req_error in block/blk-mq.c, with a function's name before Linux 5.16.
	requestError = regexp.MustCompile(`^(?:[a-z_]+: )?[A-Za-z/ ]+ error, dev ([^ ,]+), sector ([0-9]+) op (0x[0-9a-f]+):`)
	// buffer_io_error in fs/buffer.c.
	bufferError = regexp.MustCompile(`^Buffer I/O error on dev(?:ice)? ([^ ,]+), `)
	// XFS (vda): …, EXT4-fs error (device vda): …, EXT4-fs (vda): …
	filesystemLine = regexp.MustCompile(`^[A-Za-z0-9-]+(?: [a-z]+)? \((?:device )?([^ ()]+)\): `)
	// __jbd2_journal_abort_hard in fs/jbd2/journal.c; a journal is named after its device and its
	// inode.
	journalLine = regexp.MustCompile(`^(?:Aborting journal on device|JBD2: .* (?:on|for|of)) ([^ ]+)-[0-9]+\.?`)
	// set_capacity_and_notify in block/genhd.c.
	sizeLine = regexp.MustCompile(`^([a-z0-9!-]+): detected capacity change from ([0-9]+) to ([0-9]+)$`)
	// Any other line that starts with a device's name.
	deviceLine = regexp.MustCompile(`^([a-z0-9!-]+): `)
)

// Values of enum req_op in include/linux/blk_types.h whose failure loses bytes; a failed discard
// does not.
const opRead, opWrite, opFlush = "0x0", "0x1", "0x2"

// concern is whether a line of the kernel's log is about a device.
type concern int

const (
	no    concern = iota
	maybe         // it is about the disk that has this partition
	yes
)

// concerns reports whether a line is about a device. The kernel logs a failed request with the name
// and the sector of the whole disk, so the sector tells which partition has failed.
func (l line) concerns(name string, partition func() (blockdev.Partition, bool)) concern {
	if l.device == name {
		return yes
	}
	if l.device == "" || !strings.HasPrefix(name, l.device) {
		return no
	}
	part, known := partition()
	switch {
	case part.Disk != l.device:
		return no
	case !l.request || !known:
		return maybe
	case part.Has(l.sector):
		return yes
	}
	return no
}

// parseLine parses a message. Its device is "" if the message names none.
func parseLine(message []byte) line {
	if found := requestError.FindSubmatch(message); found != nil {
		op := string(found[3])
		sector, err := strconv.ParseUint(string(found[2]), 10, 64)
		return line{device: string(found[1]), request: err == nil, sector: sector, read: op == opRead, write: op == opWrite || op == opFlush}
	}
	if found := filesystemLine.FindSubmatch(message); found != nil {
		said := message[len(found[0]):]
		return line{
			device:  string(found[1]),
			stopped: bytes.HasPrefix(message, []byte("EXT4-fs (")) && bytes.HasPrefix(said, []byte("Remounting filesystem read-only")),
			// from ext4_remount in fs/ext4/super.c
			remounted: bytes.HasPrefix(said, []byte("re-mounted")),
		}
	}
	if found := sizeLine.FindSubmatch(message); found != nil {
		before, err := strconv.ParseUint(string(found[2]), 10, 64)
		sectors, err2 := strconv.ParseUint(string(found[3]), 10, 64)
		// A SCSI disk gets the size 0 while its size is not known (sd_revalidate_disk in
		// drivers/scsi/sd.c).
		return line{device: string(found[1]), shrunk: errors.Join(err, err2) == nil && sectors != 0 && sectors < before, sectors: sectors}
	}
	for _, form := range []*regexp.Regexp{bufferError, journalLine, deviceLine} {
		if found := form.FindSubmatch(message); found != nil {
			return line{device: string(found[1])}
		}
	}
	return line{}
}
